"""Tests what run() returns where the end of the others is not heard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch.distributed as dist

from thalweg import elastic
from thalweg.elastic import _run
from thalweg.elastic._gathering import Finished
from thalweg.elastic._mailbox import Plan
from thalweg.elastic._nodes import Address

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


@pytest.mark.parametrize(
    "then", [TimeoutError("no membership"), ConnectionError("has gone"), Finished("have ended")]
)
def test_result_is_returned_where_others_have_gone_after_a_barrier_that_failed_here(
    then, monkeypatch
):
    def fail() -> None:
        raise RuntimeError("the peer closed the connection")

    monkeypatch.setenv("THALWEG_TIMEOUT", f"{TIMEOUT:g}")
    monkeypatch.setenv("THALWEG_RECONNECT", "3")  # run() sets it
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(_run, "FirstWorker", Gatherer)
    monkeypatch.setattr(Gatherer, "then", then, raising=False)
    monkeypatch.setattr(dist, "barrier", fail)
    train = elastic.run(lambda _: "result", nodes="127.0.0.1:1,127.0.0.1:2", node=0, backend="gloo")
    assert train(elastic.State(step=0)) == "result"
