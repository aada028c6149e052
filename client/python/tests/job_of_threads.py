"""Runs what all workers of a job do together, each on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from thalweg._job import _collectives
from thalweg._job._topology import Introduction, Tensor

TIMEOUT = 20.0  # for waits that should never time out


def worker(host: str = "a", sidecar: str = "", **changes: Any) -> Introduction:
    fields = {
        "running": "",
        "running_listens": False,
        "aggregators": (),
        "job": "job-1",
        "secret": "5e" * 32,
        "codec": "fp32",
        "chunk_bytes": 4096,
        "local_shards": "auto",
        "node_reduce": "sidecar",
        "timeout": 30.0,
        "step_timeout": 1800.0,
        "model": (Tensor("weight", "float32", (10, 3)), Tensor("bias", "float32", (10,))),
        "problem": "",
    }
    return Introduction(host=host, sidecar=sidecar, **(fields | changes))


class Workers:
    """The workers of a job; torch's collective is replaced for them."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._own = threading.local()
        monkeypatch.setattr(_collectives, "gather", self._gather)

    def _gather(self, value: Any, group: object) -> list[Any]:
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, work: Callable[[int], Any]) -> Sequence[Any]:
        """Returns what `work` returns or raises on every worker, by rank."""

        def on_thread(rank: int) -> Any:
            self._own.rank = rank
            try:
                return work(rank)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                return error

        with ThreadPoolExecutor(len(self._values)) as pool:
            return list(pool.map(on_thread, range(len(self._values))))
