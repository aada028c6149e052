"""Measures training in step, and at own paces, on nodes that are slow in some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from thalweg_bench.case import Outcome
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.options import POSITIVE, Bytes, Seconds, number, one_of
from thalweg_bench.shape import UNSHAPED, Shape

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories


@dataclass(frozen=True, kw_only=True)
class PaceCase(ClusterCase):
    """nodes that are slow in some steps, in step and at their own pace

    example:
      thalweg bench pace --nodes 8 --shards 1 --slow random --factor 3
    """

    shape: Shape = UNSHAPED
    repeats: Annotated[int, number(1, 1000)] = 3
    bytes: Bytes = 1_000_000  # of the model
    steps: Annotated[int, number(1, 10_000, "of each node, or of as many gradients for all")] = 100
    step: Seconds = 0.05  # that a node works in a step
    slow: Annotated[
        str, one_of(("one", "random"), "the last node in all steps, or a random one in each")
    ] = "one"
    factor: Annotated[float, POSITIVE] = 10.0  # by which a slow step takes longer
    staleness: Annotated[int, number(1, 64)] = 8
    every: Annotated[int, number(1, 10_000, "from one exchange of local updates to the next")] = 10

    @property
    def name(self) -> str:
        whose = "the last one" if self.slow == "one" else "a random one in each step"
        steps = f"steps of {self.step * 1e3:g} ms"
        return f"{self.shape}, {steps}, {whose} {self.factor:g} times as slow"

    @property
    def size(self) -> int:
        return self.bytes

    @property
    def systems(self) -> tuple[str, ...]:
        local = f"local {self.every}"
        quorum = f"quorum of {max(1, self.shape.ranks - 1)}, {local}"
        return ("sync", f"stale {self.staleness}", "async", local, quorum)

    def factories(self) -> Factories:
        from thalweg_bench.ps_step import factories

        return factories(self)

    def seconds_of(self, rank: int, step: int) -> float:
        """Returns how long that worker works in its own step of this number."""
        return self.step * (self.factor if self._is_slow(rank, step) else 1.0)

    def _is_slow(self, rank: int, step: int) -> bool:
        if self.slow == "one":
            return rank == self.shape.ranks - 1
        # The same node for all, and another one in most steps (Knuth's multiplicative hash).
        return step * 2_654_435_761 % 2**32 * self.shape.ranks >> 32 == rank

    def bound(self, system: str, rate: float | None = None) -> float:
        """Returns how long the nodes work at least for so many gradients, if nothing else takes
        time: in step, or in the same exchanges, always as long as the slowest; or never waiting, as
        long as the slowest in all its steps; or all together, whoever takes a step.
        """
        mode = system.split(maxsplit=1)[0]
        if mode in ("sync", "local"):
            every = 1 if mode == "sync" else self.every
            return sum(
                max(self._seconds_of(first, min(first + every, self.steps)))
                for first in range(0, self.steps, every)
            )
        alone = self._seconds_of(0, self.steps)
        if mode in ("async", "quorum"):
            return self.shape.ranks / sum(1 / seconds for seconds in alone)
        return max(alone)

    def _seconds_of(self, first: int, end: int) -> list[float]:
        """Returns how long each worker works in these steps."""
        steps = range(first, end)
        return [sum(self.seconds_of(r, step) for step in steps) for r in range(self.shape.ranks)]

    def run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster)
            self.open(cluster)
            return Outcome(self.rows(self.take_turns(cluster)))
