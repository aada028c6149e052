"""Measures the back end's collectives beside Gloo's, in turns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from thalweg_bench.case import Outcome, run_alternating
from thalweg_bench.cluster import Cluster
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.options import Bytes, names, number, peers
from thalweg_bench.rows import Row, make_row, say

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories

# They are the keys of thalweg_bench.collectives.KINDS; that module loads torch.
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_NAMES = (*_REDUCING, "all_gather", "broadcast", "all_to_all", "barrier")


@dataclass(frozen=True, kw_only=True)
class CollectivesCase(ClusterCase):
    """the collectives of torch.distributed

    --bytes is what a rank gives or gets, whichever is more. The time of a turn is the median of
    --count collectives.
    """

    only: Annotated[tuple[str, ...], names(_NAMES)] = _NAMES
    bytes: Bytes = 102_400_000
    count: Annotated[int, number(1, 100_000, "collectives in a turn")] = 1
    peers: Annotated[tuple[str, ...], peers("gloo")] = ("gloo",)
    offers: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return str(self.shape)

    @property
    def size(self) -> int:
        return self.bytes

    def factories(self) -> Factories:
        from thalweg_bench.collectives import factories, make_pattern

        return factories(make_pattern(self.size, "fp32"))

    def bound_of(self, name: str) -> float | None:
        """Returns how long the links take at least for a collective, by any means."""
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

    def run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster, gloo="gloo" in self.peers)
            return Outcome([row for name in self.only for row in self._measure(cluster, name)])

    def _measure(self, cluster: Cluster, name: str) -> list[Row]:
        label, bound = f"{name}, {self.shape}", self.bound_of(name)
        say(label)
        for system in self.systems:
            cluster.open(f"{system} {name}", self.size)

        def once(system: str, repeat: int) -> float:
            if self.count == 1:
                return cluster.measure(f"{system} {name}", repeat, bound)
            return statistics.median(cluster.measure_many(f"{system} {name}", self.count, bound))

        found = run_alternating(self.systems, self.repeats, once)
        cluster.call("close")
        return [make_row(label, s, self.size, found[s], bound) for s in self.systems]
