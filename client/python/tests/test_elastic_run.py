"""Tests what run() does about a training that fails or ends, with one worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch.distributed as dist

from thalweg import ddp, elastic
from thalweg.elastic import _run
from thalweg.elastic._gathering import Finished
from thalweg.elastic._mailbox import Plan
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Standing

TIMEOUT = 7.0


class Gatherer:
    """A first worker that plays one membership of its node alone, and then raises `then`."""

    then: Exception

    def __init__(self, *given: object) -> None:
        self._open_store: Callable[[], Address] = given[3]
        self.silences: list[float] = []

    def gather(self, _standing: object, last: Plan | None, _seconds: float, silence: float) -> Plan:
        self.silences.append(silence)
        if last is not None:
            assert self.silences == [float("inf"), TIMEOUT]
            raise self.then
        return Plan(1, "plan", (0,), (1,), ("question",), self._open_store(), (), (0,))

    def guard(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, _: object) -> None: ...

    def has_comers(self) -> bool:
        return False

    def finish(self, _: object) -> None: ...

    def close(self) -> None: ...


class AnyGatherer(Gatherer):
    """The same for any number of memberships; `seen` is what has been asked of it."""

    seen: ClassVar[list[str]]

    def gather(self, standing: Standing, last: Plan | None, *_: float) -> Plan:
        number = 1 if last is None else last.generation + 1
        self.seen.append(f"gather {number}")
        self.ended = standing.ended
        where = self._open_store()
        return Plan(number, f"plan{number}", (0,), (1,), ("question",), where, (), (0,))

    def begin(self, standing: Standing) -> None:
        self.seen.append(f"begin {standing.generation} of {standing.members}")

    def finish(self, _: object) -> None:
        assert dist.is_initialized()
        self.seen.append("finish")

    def close(self) -> None:
        self.seen.append(f"close after {self.ended}")


@pytest.fixture
def run(monkeypatch):
    """Runs a training; its result, or what it raises, and what the gatherer was asked."""

    def run(train, gatherer=AnyGatherer, **parts):
        monkeypatch.setattr(_run, "FirstWorker", gatherer)
        monkeypatch.setattr(AnyGatherer, "seen", [], raising=False)
        state = elastic.State(**parts)
        nodes = "127.0.0.1:1,127.0.0.1:2"
        training = elastic.run(train, nodes=nodes, node=0, backend="gloo")
        try:
            return training(state)
        finally:
            if dist.is_initialized():  # after a training that has ended well
                dist.destroy_process_group()

    monkeypatch.setenv("THALWEG_TIMEOUT", f"{TIMEOUT:g}")
    monkeypatch.setenv("THALWEG_RECONNECT", "3")  # run() sets it
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    return run


@pytest.mark.parametrize(
    "then", [TimeoutError("no membership"), ConnectionError("has gone"), Finished("have ended")]
)
def test_result_is_returned_where_others_have_gone_after_a_barrier_that_failed_here(
    then, monkeypatch, run
):
    def fail() -> None:
        raise RuntimeError("the peer closed the connection")

    monkeypatch.setattr(Gatherer, "then", then, raising=False)
    monkeypatch.setattr(dist, "barrier", fail)
    assert run(lambda _: "result", Gatherer, step=0) == "result"


def test_training_that_ends_tells_the_others_and_then_no_more(run, monkeypatch):
    monkeypatch.setattr(_run._Runner, "ended", 0)
    monkeypatch.setattr(dist, "barrier", lambda: AnyGatherer.seen.append("barrier"))

    def train(state):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        return f"{state.membership}, of {dist.get_world_size()}"

    for ended in range(2):
        assert run(train) == "membership 1: node 0, 1 workers, of 1"
        expected = ["gather 1", "begin 1 of (0,)", "barrier", "finish", f"close after {ended}"]
        assert AnyGatherer.seen == expected


def test_training_that_fails_three_times_without_a_commit_in_between_is_at_fault(run):
    calls = []

    def train(state):
        calls.append(state.step)
        if len(calls) in {2, 4}:
            state.step += 1
            state.commit()
        state.step += 10  # since the last commit
        raise RuntimeError(f"failure {len(calls)}")

    with pytest.raises(RuntimeError, match="failure 6"):
        run(train, step=0)
    assert calls == [0, 0, 1, 1, 2, 2]
    assert AnyGatherer.seen[-3:-1] == ["gather 6", "begin 6 of (0,)"]


def test_worker_leaves_a_membership_that_fails_before_the_next_one(run, monkeypatch):
    groups, states, closed = [], [], []

    def close_all():
        closed.append((dist.is_initialized(), states[0].membership))

    def train(state):
        groups.append(dist.group.WORLD)
        states.append(state)
        if len(groups) == 1:
            raise ConnectionError("a node is lost")
        return closed

    monkeypatch.setattr(ddp, "close_all", close_all)
    assert run(train) == [(True, None)]
    assert groups[0] is not groups[1]


def test_other_faults_of_a_training_are_raised_at_once(run):
    def train(_):
        raise ValueError("lr")

    with pytest.raises(ValueError, match="lr"):
        run(train)
    assert AnyGatherer.seen[:-1] == ["gather 1", "begin 1 of (0,)"]
    assert AnyGatherer.seen[-1].startswith("close")
