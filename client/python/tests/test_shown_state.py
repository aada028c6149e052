"""Tests what an optimizer shows of a state that the shards have."""

import copy
import logging
import pickle
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from thalweg.ps._shown_state import ShownState


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="thalweg")
    return lambda: sum("state.clear() has no effect" in each for each in caplog.messages)


def test_script_that_clears_what_the_shards_have_is_told_once(said):
    state = ShownState({}, SimpleNamespace(is_published=True))
    state.clear()
    state.clear()
    assert said() == 1


def test_state_that_no_shard_has_is_cleared_without_a_word(said):
    weight = torch.ones(2)
    state = ShownState({weight: {"step": 3}}, SimpleNamespace(is_published=False))
    state.clear()
    assert not state
    assert said() == 0
    assert state[weight] == {}  # as in torch's


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        ShownState.copy,
        lambda state: state | {},
        lambda state: {} | state,
        lambda state: pickle.loads(pickle.dumps(state)),
    ],
)
def test_copy_is_a_plain_dictionary(copied):
    state = ShownState({torch.ones(2): {"step": 3}}, SimpleNamespace(is_published=True))
    result = copied(state)
    assert type(result) is defaultdict
    assert [*result.values()] == [{"step": 3}]
    assert result["another"] == {}
    assert len(state) == 1


def test_union_has_the_values_of_what_comes_last():
    state = ShownState({"a": 1, "b": 1}, SimpleNamespace(is_published=True))
    assert state | {"b": 2} == {"a": 1, "b": 2}
    assert {"b": 2} | state == {"a": 1, "b": 1}
    with pytest.raises(TypeError, match="unsupported operand"):
        state | 3
