"""`thalweg bench collectives` runs the back end's collectives beside Gloo's, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg_bench.cluster import START_DELAY, Cluster, Shape, watchdog_seconds
from thalweg_bench.lab_case import run_alternating
from thalweg_bench.latency import durations
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.torch_import import import_torch


@dataclass(frozen=True)
class CollectivesCase:
    shape: Shape
    names: tuple[str, ...]  # of thalweg_bench.collectives.KINDS
    size: int  # bytes of all that one rank gives, or gets, whichever is more
    count: int  # collectives of one turn, of which the median counts
    peers: tuple[str, ...]
    repeats: int

    @property
    def systems(self) -> tuple[str, ...]:
        return ("thalweg", *self.peers)

    def bound(self, name: str) -> float | None:
        """Returns how long the links take at least, by any means."""
        shape, rate = self.shape, self.shape.rate
        if rate is None or shape.nodes == 1 or name == "barrier":
            return None
        if name == "all_reduce":
            return shape.exchange_bound(self.size, rate)
        once = self.size * 8 / rate
        if name in ("broadcast", "reduce"):
            return once
        elsewhere = once * (shape.nodes - 1) / shape.nodes
        return elsewhere * shape.workers if name == "all_to_all" else elsewhere


def run(case: CollectivesCase) -> list[Row]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    rows = []
    with Cluster(case.shape) as cluster:
        import_torch()
        from thalweg_bench.collectives import factories
        from thalweg_bench.worker import Worker

        systems = factories(case.size)
        cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
        if "gloo" in case.peers:
            cluster.call("start_gloo")
        for name in case.names:
            rows += _measure(cluster, case, name)
    return rows


def _measure(cluster: Cluster, case: CollectivesCase, name: str) -> list[Row]:
    say(f"{name}, {case.shape}, {case.size} bytes")
    bound = case.bound(name)
    for system in case.systems:
        cluster.open(f"{system} {name}", case.size)

    def once(system: str, repeat: int) -> float:
        if case.count == 1:
            return cluster.measure(f"{system} {name}", repeat, bound)
        start = time.monotonic() + START_DELAY
        seconds = watchdog_seconds((bound or 0.01) * case.count)
        times: Sequence[Sequence[tuple[float, float]]] = cluster.crew.call(
            "run_many", f"{system} {name}", start, case.count, seconds=seconds
        )
        return statistics.median(durations(times))

    found = run_alternating(case.systems, case.repeats, once)
    label = f"{name}, {case.shape}"
    return [make_row(label, system, case.size, found[system], bound) for system in case.systems]
