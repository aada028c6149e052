"""Tests what workers are told who load checkpoints of local updates."""

import functools

import pytest
import torch
from job_of_threads import Workers

from thalweg._job import _collectives
from thalweg.ps import _alike


def state(steps=6, due=None, **changes):
    fragments = [{"due": due}, {"due": None}]
    weights, outer = {"weight": torch.ones(2, 3)}, {"weight": {"momentum_buffer": torch.ones(2, 3)}}
    return {"steps": steps, "weights": weights, "fragments": fragments, "outer": outer} | changes


@pytest.fixture
def told(monkeypatch):
    """Returns what workers are told who load these states, by rank; empty: nothing."""

    def tell(*states, fragments=2, has_quorum=False):
        workers = Workers(len(states), monkeypatch)

        def all_gather_object(found, mine, group):
            found[:] = _collectives.gather(mine, group)

        monkeypatch.setattr(_alike.dist, "get_world_size", lambda group: len(states))
        monkeypatch.setattr(_alike.dist, "all_gather_object", all_gather_object)
        check = functools.partial(_alike.check_alike, None, has_quorum=has_quorum)
        results = workers.run(lambda rank: check(states[rank], fragments))
        assert all(each is None or isinstance(each, ValueError) for each in results), results
        return ["" if each is None else str(each) for each in results]

    return tell


def test_states_of_the_same_step_are_loaded(told):
    assert told(state(), state(), state()) == ["", "", ""]
    assert told(state(due=7), state(due=7)) == ["", ""]
    zeros = {"weight": torch.zeros(2, 3)}
    assert told(state(), state(weights=zeros)) == ["", ""]  # rank 0's count


def test_worker_with_another_number_of_fragments_is_told_so(told):
    expected = "thalweg: the checkpoint has 2 fragments, expected 3"
    assert told(state(), state(), fragments=3) == [expected] * 2


OTHER_OUTER = {"weight": {"exp_avg": torch.ones(2, 3)}}
OTHERS = {
    "step": {"steps": 5},
    "exchanges": {"due": 7},
    "rests": {"fragments": [{"due": None, "owes": True}, {"due": None}]},
    "shapes": {"weights": {"weight": torch.ones(3, 2)}},
    "names": {"weights": {"bias": torch.ones(2, 3)}},
    "moments": {"outer": OTHER_OUTER},
    "no moments": {"outer": {}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_all_workers_are_told_which_one_loads_something_else(other, told):
    results = told(state(), state(**OTHERS[other]), state())
    assert len(set(results)) == 1
    step = OTHERS[other].get("steps", 6)
    assert f"rank 1 loads a checkpoint of step {step}, rank 0 of step 6" in results[0]


@pytest.mark.parametrize("other", OTHERS)
def test_with_a_quorum_workers_may_be_in_steps_and_exchanges_of_their_own(other, told):
    results = told(state(), state(**OTHERS[other]), has_quorum=True)
    may_be = other in {"step", "exchanges", "rests"}
    assert list(map(bool, results)) == [not may_be] * 2


def test_state_of_a_version_that_did_not_say_what_workers_owe_owes_nothing(told):
    owing_nothing = [{"due": None, "owes": False}] * 2
    assert told(state(), state(fragments=owing_nothing)) == ["", ""]
