"""`thalweg bench pace` trains in step, and at own paces, on nodes that are slow in some steps."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.lab_case import run_alternating
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.torch_import import import_torch

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class PaceCase:
    shape: Shape
    size: int  # bytes of the model
    steps: int  # of each node, or of as many gradients for all
    step_seconds: float  # that a node works in a step
    slow: str  # which nodes are slow: the last "one", or a "random" one in each step
    factor: float  # by which a slow step takes longer
    staleness: int
    repeats: int

    @property
    def name(self) -> str:
        whose = "the last one" if self.slow == "one" else "a random one in each step"
        return (
            f"{self.shape}, steps of {self.step_seconds * 1e3:g} ms, {whose} {self.factor:g} times "
            "as slow"
        )

    @property
    def systems(self) -> tuple[str, ...]:
        return ("sync", f"stale {self.staleness}", "async")

    def seconds_of(self, rank: int, step: int) -> float:
        """Returns how long that worker works in its own step of this number."""
        return self.step_seconds * (self.factor if self._is_slow(rank, step) else 1.0)

    def _is_slow(self, rank: int, step: int) -> bool:
        if self.slow == "one":
            return rank == self.shape.ranks - 1
        # The same node for all, and another one in most steps (Knuth's multiplicative hash).
        return step * 2_654_435_761 % 2**32 * self.shape.ranks >> 32 == rank

    def bound(self, system: str) -> float:
        """Returns how long the nodes work at least for so many gradients, if nothing else takes
        time: in step, always as long as the slowest; or never waiting, as long as the slowest in
        all its steps; or all together, whoever takes a step.
        """
        ranks, steps = range(self.shape.ranks), range(self.steps)
        if system == "sync":
            return sum(max(self.seconds_of(rank, step) for rank in ranks) for step in steps)
        alone = [sum(self.seconds_of(rank, step) for step in steps) for rank in ranks]
        if system == "async":
            return self.shape.ranks / sum(1 / seconds for seconds in alone)
        return max(alone)


def run(case: PaceCase) -> list[Row]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    with Cluster(case.shape) as cluster:
        say(case.name)
        import_torch()
        from thalweg_bench.pace_step import factories
        from thalweg_bench.worker import Worker

        systems = factories(case)
        cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
        cluster.call("start_gloo")
        for system in case.systems:
            cluster.call("open", system)
        slowest = max(map(case.bound, case.systems))

        def once(system: str, repeat: int) -> float:
            return cluster.measure(system, repeat, slowest)

        times = run_alternating(case.systems, case.repeats, once)
    return [
        make_row(case.name, system, case.size, seconds, case.bound(system))
        for system, seconds in times.items()
    ]
