"""Tests what an elastic training keeps, and how its sampler divides an epoch."""

from __future__ import annotations

import collections
import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from thalweg import elastic


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def training():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, elastic.State(model=model, optimizer=optimizer, epoch=0, seen=[])


def everything(model, optimizer):
    parts = [*model.state_dict().values()]
    for of_parameter in optimizer.state_dict()["state"].values():
        parts += [torch.as_tensor(value) for value in of_parameter.values()]
    return [part.clone() for part in parts]


def test_what_follows_a_commit_is_undone_as_often_as_asked():
    model, optimizer, state = training()
    step(model, optimizer)
    state.epoch, state.seen = 3, [7]
    state.commit()
    expected = everything(model, optimizer)
    for _ in range(2):
        step(model, optimizer)
        state.epoch = 4
        state.seen.append(8)
        state.restore()
        assert all(map(torch.equal, everything(model, optimizer), expected))
        assert (state.epoch, state.seen, state.commits) == (3, [7], 1)


def test_part_that_was_nothing_at_the_last_commit_is_nothing_again():
    state = elastic.State(scheduler=None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state.restore()
    assert state.scheduler is None


def test_tensors_of_a_commit_are_used_again_by_the_next():
    model, optimizer, state = training()
    step(model, optimizer)
    state.commit()
    before = state._kept["optimizer"]["state"][0]["exp_avg"]
    step(model, optimizer)
    state.commit()
    after = state._kept["optimizer"]["state"][0]["exp_avg"]
    assert after.data_ptr() == before.data_ptr()
    assert torch.equal(after, optimizer.state_dict()["state"][0]["exp_avg"])


def test_commit_that_fails_leaves_the_last_one_as_it_was():
    class Failing:
        fails = False

        def state_dict(self):
            if self.fails:
                raise RuntimeError("no state")
            return {}

        def load_state_dict(self, state_dict):
            pass

    model, optimizer, _ = training()
    last = Failing()
    state = elastic.State(model=model, optimizer=optimizer, last=last)
    expected = everything(model, optimizer)
    step(model, optimizer)
    last.fails = True
    with pytest.raises(RuntimeError, match="no state"):
        state.commit()
    state.restore()
    assert all(map(torch.equal, everything(model, optimizer), expected))
    assert state.commits == 0


def test_commits_leave_a_checkpoint_that_was_loaded_as_it_was():
    model, optimizer, state = training()
    step(model, optimizer)
    state.commit()
    saved = copy.deepcopy(state.state_dict())
    kept = copy.deepcopy(saved)
    state.load_state_dict(saved)
    step(model, optimizer)
    state.commit()
    now = saved["parts"]["model"]
    assert all(torch.equal(now[name], value) for name, value in kept["parts"]["model"].items())


def test_checkpoint_of_other_parts_is_refused_by_name():
    _, _, state = training()
    with pytest.raises(ValueError, match="saved with model, this one has epoch, model, optimizer"):
        state.load_state_dict({"commits": 1, "parts": {"model": {}}})


def test_part_with_a_name_of_the_states_own_is_refused():
    with pytest.raises(ValueError, match="'commits' already"):
        elastic.State(commits=1)


@pytest.fixture
def be(monkeypatch):
    """Lets this process be a worker of so many."""

    def become(rank: int, world: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)

    return become


def test_every_sample_of_an_epoch_is_used_once_by_a_changing_number_of_workers(be):
    sampler = elastic.Sampler(range(120), seed=2)
    used = []
    for world, steps in ((4, 5), (3, 4), (4, 100)):
        mine = []
        for rank in range(world):
            be(rank, world)
            mine.append(list(sampler))
            assert len(sampler) == len(mine[-1])
        for first in range(0, min(2 * steps, len(mine[0])), 2):
            parts = [one[first : first + 2] for one in mine]
            used += itertools.chain(*parts)
            sampler.took(len(parts[0]))
    assert sampler.left == 0
    assert sorted(used) == list(range(120))
    sampler.set_epoch(1)
    be(0, 1)
    assert sampler.left == 120
    assert sorted(sampler) == list(range(120)) != list(sampler)


def test_sampler_pads_a_small_rest_so_that_all_have_as_many(be):
    sampler = elastic.Sampler(range(5), shuffle=False)
    be(0, 4)
    sampler.took(1)
    parts = []
    for rank in range(4):
        be(rank, 4)
        parts.append(list(sampler))
    assert parts == [[4]] * 4


class Reluctant:
    """A value whose copy fails, as one does for which there is no memory."""

    fails = False

    def __deepcopy__(self, memo):
        if self.fails:
            raise RuntimeError("no memory")
        return self


def test_commit_that_fails_half_way_leaves_the_last_one_as_it_was():
    model, optimizer, _ = training()
    last = Reluctant()
    state = elastic.State(model=model, optimizer=optimizer, last=last)
    step(model, optimizer)
    state.commit()
    expected = everything(model, optimizer)
    step(model, optimizer)
    last.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        state.commit()
    last.fails = False
    state.restore()
    assert all(map(torch.equal, everything(model, optimizer), expected))
    assert state.commits == 1


def test_dictionary_that_adds_when_it_is_updated_is_kept_as_it_is():
    state = elastic.State(seen=collections.Counter())
    for _ in range(4):
        state.seen["sample"] += 1
        state.commit()
    state.restore()
    assert state.seen == {"sample": 4}
    assert isinstance(state.seen, collections.Counter)


def test_checkpoint_stays_as_it_was_when_the_training_goes_on():
    model, optimizer, state = training()
    step(model, optimizer)
    state.commit()
    best, expected = state.state_dict(), everything(model, optimizer)
    step(model, optimizer)
    state.commit()
    state.load_state_dict(best)
    assert all(map(torch.equal, everything(model, optimizer), expected))


def test_loop_that_logs_exceptions_and_goes_on_is_interrupted_all_the_same():
    state = elastic.State(epoch=0)
    state._has_comers = lambda: True
    with pytest.raises(BaseException, match="nodes have come"):
        try:
            state.commit()
        except Exception:  # noqa: BLE001 - as such loops do
            pytest.fail("the loop has gone on")


class Optimizer:
    """A part that has saved what a codec carries, or not."""

    def __init__(self, has_codec):
        self._saved = {"thalweg": []} if has_codec else {}

    def state_dict(self):
        return self._saved

    def load_state_dict(self, state_dict):
        pass


@pytest.mark.parametrize(
    ("workers", "newest"),
    [
        ([(4, False), (5, False), (5, True), (5, True)], 2),
        ([(5, True), (6, False), (4, True)], 1),
        ([(5, False), (5, False)], 0),
    ],
)
def test_newest_state_is_one_with_the_codecs_part_if_any_of_the_last_commit_has_it(
    workers, newest, monkeypatch
):
    states = [elastic.State(optimizer=Optimizer(has_codec)) for _, has_codec in workers]
    standings, roots = [], []

    def gather(found, mine):
        standings.append(mine)
        found[: len(standings)] = standings

    monkeypatch.setattr(dist, "all_gather_object", gather)
    for state, (commits, _) in zip(states, workers, strict=True):
        state.commits = commits
        monkeypatch.setattr(state, "_send", roots.append)
        state._begin(SimpleNamespace(world_size=len(workers)), 1, lambda: False)
    assert roots[-1] == newest  # which has heard of all


@pytest.mark.usefixtures("lone_group")
def test_listeners_hear_of_a_membership_when_its_state_is_in_place():
    state, membership, heard = elastic.State(epoch=0), SimpleNamespace(world_size=1), []
    state.epoch = 5  # since the last commit
    for number in range(2):
        state.on_change(lambda m, n=number: heard.append((n, m, state.membership, state.epoch)))
    state._begin(membership, 0, lambda: False)
    assert heard == [(number, membership, membership, 0) for number in range(2)]
