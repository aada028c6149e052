"""Tests which back end the default process group gets."""

import logging

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from thalweg._c10d import _default_group
from thalweg._settings import _variables
from thalweg._settings._variables import ConfigError
from thalweg._torch import _patches


def choose(asked, **changes):
    facts = dict.fromkeys(("wanted", "has_options", "has_gpus", "by_torchcomms"), False)
    return _default_group.choose(asked, **(facts | {"wanted": True} | changes))


@pytest.mark.parametrize("asked", ["gloo", "nccl", "undefined", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(("gpus", "ours"), [(False, "thalweg"), (True, "cpu:thalweg,cuda:nccl")])
def test_usual_back_ends_are_replaced_and_it_is_said(asked, gpus, ours):
    choice = choose(asked, has_gpus=gpus)
    assert choice.backend == ours
    assert choice.level == logging.INFO
    assert ours in choice.remark
    assert "THALWEG_BACKEND=1" in choice.remark
    assert (asked in choice.remark) == (asked != "undefined")


@pytest.mark.parametrize(("asked", "options"), [("mpi", False), ("fake", False), ("nccl", True)])
def test_what_cannot_be_replaced_stays_with_a_warning(asked, options):
    choice = choose(asked, has_options=options)
    assert (choice.backend, choice.level) == (asked, logging.WARNING)
    assert asked in choice.remark


@pytest.mark.parametrize("asked", ["gloo", "nccl", "undefined", "mpi"])
def test_nothing_is_replaced_or_said_unless_it_is_wanted(asked):
    assert choose(asked, wanted=False)[:2] == (asked, "")


@pytest.mark.parametrize("asked", ["thalweg", "cpu:thalweg,cuda:nccl"])
def test_what_is_ours_already_stays(asked):
    assert choose(asked)[:2] == (asked, "")


@pytest.mark.parametrize(
    ("asked", "wanted", "warns"),
    [("gloo", True, True), ("thalweg", False, True), ("gloo", False, False)],
)
def test_torchcomms_keeps_its_groups_and_is_named_where_ours_was_asked_for(asked, wanted, warns):
    choice = choose(asked, wanted=wanted, by_torchcomms=True)
    assert choice.backend == asked
    assert ("TORCH_DISTRIBUTED_USE_TORCHCOMMS" in choice.remark) == warns


@pytest.mark.parametrize(
    ("env", "wanted", "watched"),
    [
        ({}, False, False),
        ({"THALWEG_BACKEND": "0"}, False, False),
        ({"THALWEG_BACKEND": "1"}, True, True),
        ({"THALWEG_BACKEND": "1", "THALWEG_ENABLE": "0"}, False, False),
        ({"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}, False, True),
        ({"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0"}, False, False),
    ],
)
def test_variables_decide_what_is_wanted_and_watched(env, wanted, watched):
    assert _variables.backend_is_wanted(env) == wanted
    assert _variables.process_groups_are_watched(env) == watched


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"THALWEG_BACKEND": "yes"}, "THALWEG_BACKEND is 'yes'"),
        ({"THALWEG_BACKEND": "1", "THALWEG_ENABLE": "false"}, "THALWEG_ENABLE is 'false'"),
    ],
)
def test_another_value_is_refused(env, name):
    with pytest.raises(ConfigError, match=f"{name}, expected 0 or 1"):
        _variables.backend_is_wanted(env)


@pytest.fixture
def asked_of_torch(monkeypatch):
    """Returns the list of the back ends that torch is asked for while the environment has a say."""
    asked = []

    def make(size, rank, ranks, backend, *args, **kwargs):
        asked.append(str(backend))
        raise InterruptedError

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setenv("THALWEG_BACKEND", "1")
    _default_group.activate()
    yield asked
    _patches.uninstall("default_group")


@pytest.mark.parametrize("torchcomms", [False, True])
def test_init_process_group_asks_for_ours_once_said(
    asked_of_torch, torchcomms, monkeypatch, caplog
):
    monkeypatch.setattr(c10d, "_use_torchcomms_enabled", lambda: torchcomms)
    monkeypatch.setattr(_default_group.torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "thalweg"), pytest.raises(InterruptedError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
    assert asked_of_torch == ["gloo" if torchcomms else "thalweg"]
    (said,) = caplog.messages
    assert ("torchcomms makes all process groups" in said) == torchcomms


@pytest.mark.parametrize("name", ["THALWEG_ENABLE", "AIAK_FP16_COMPRESSION", "THALWEG_TIMEOUT"])
@pytest.mark.parametrize("rank", [0, 1])
def test_malformed_variable_fails_every_rank_by_its_name(asked_of_torch, monkeypatch, name, rank):
    monkeypatch.setenv(name, "false")
    with pytest.raises(ConfigError, match=f"^thalweg: {name} is 'false', expected "):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=2)
    assert not asked_of_torch


def test_groups_that_are_made_of_ranks_are_left_alone(asked_of_torch, caplog):
    with pytest.raises(InterruptedError):
        c10d._new_process_group_helper(2, 0, [0, 1], "gloo", None, "name")
    assert asked_of_torch == ["gloo"]
    assert not caplog.messages
