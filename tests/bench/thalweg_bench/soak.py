"""`thalweg bench soak` runs very many small allreduces and measures the memory afterwards."""

from __future__ import annotations

from thalweg_bench import lab_case, latency
from thalweg_bench.cluster import Cluster
from thalweg_bench.lab_case import LabCase, Outcome
from thalweg_bench.resources import rss_mb
from thalweg_bench.rows import make_row, say

_PARTS = 10


def run(case: LabCase, count: int) -> Outcome:
    """Measures the resident memory after a tenth of the allreduces and after all of them.

    Raises BenchError, LabError or ServerError.
    """
    part = count // _PARTS
    outcome = Outcome([], [])
    with Cluster(case.shape) as cluster:
        lab_case.start_workers(cluster, case)
        lab_case.open_systems(cluster, case)
        for first, last in ((0, part), (part, part * _PARTS)):
            seconds: list[float] = []
            usage = cluster.usage()
            usage.start()
            for done in range(first + part, last + 1, part):
                seconds += latency.measure_many(cluster, case, "thalweg", part)
                say(f"{done}/{part * _PARTS} steps")
            usage.stop(rounds=last - first)
            name = f"{case.name}, steps {first + 1} to {last}"
            outcome.rows.append(make_row(name, "thalweg", case.size, seconds, None))
            outcome.resources.extend(usage.report(name, lab_case.round_bytes(case), rss_mb))
    return outcome
