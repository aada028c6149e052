"""`thalweg bench latency` measures how long one small allreduce takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from thalweg_bench import lab_case
from thalweg_bench.cluster import START_DELAY, Cluster, watchdog_seconds
from thalweg_bench.lab_case import LabCase
from thalweg_bench.rows import Row, percentile, say

_PERCENTILES = (50, 99)
_MOST_SECONDS = 0.01  # per small allreduce; the watchdog allows a multiple


def run(case: LabCase, count: int) -> list[Row]:
    """Runs `count` allreduces per repeat. Raises BenchError, LabError or ServerError."""
    systems = ("thalweg", *case.peers)
    runs: dict[str, list[list[float]]] = {system: [] for system in systems}
    with Cluster(case.shape) as cluster:
        lab_case.start_workers(cluster, case)
        lab_case.open_systems(cluster, case)
        for repeat in range(case.repeats + 1):
            for system in systems:
                seconds = measure_many(cluster, case, system, count)
                turn = f"{repeat}/{case.repeats}" if repeat else "warm-up"
                say(f"{turn} {system}: p50 {percentile(seconds, 50) * 1e3:.3f} ms")
                if repeat > 0:
                    runs[system].append(seconds)
    return make_rows(case, runs)


def make_rows(case: LabCase, runs: dict[str, list[list[float]]]) -> list[Row]:
    """Makes rows: the percentile of all allreduces, with a repeat's lowest and highest."""
    rows = []
    for percent in _PERCENTILES:
        for system, repeats in runs.items():
            everything = [seconds for repeat in repeats for seconds in repeat]
            each = [percentile(repeat, percent) for repeat in repeats]
            rows.append(
                Row(
                    case=f"{case.name} p{percent}",
                    system=system,
                    bytes=case.size,
                    median_s=percentile(everything, percent),
                    min_s=min(each),
                    max_s=max(each),
                    bound_s=None,
                )
            )
    return rows


def durations(times: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Returns each allreduce's time from the first worker's begin to the last one's end."""
    return [
        max(end for _, end in of_all) - min(begin for begin, _ in of_all)
        for of_all in zip(*times, strict=True)
    ]


def measure_many(cluster: Cluster, case: LabCase, system: str, count: int) -> list[float]:
    """Returns the seconds of each of `count` allreduces."""
    start = time.monotonic() + START_DELAY
    each = _MOST_SECONDS + (lab_case.slowest_bound(case) or 0.0)
    seconds = watchdog_seconds(each * count)
    return durations(cluster.crew.call("run_many", system, start, count, seconds=seconds))
