"""Measures allreduces through a whole cluster: large ones, small ones, very many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from thalweg_bench.case import Outcome
from thalweg_bench.cluster import Cluster
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.options import DType, Resources, Sizes, number, peers
from thalweg_bench.resources import rss_mb
from thalweg_bench.rows import Row, make_row, percentile, say
from thalweg_bench.shape import UNSHAPED, Shape

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories

_TRAINING = ("thalweg", "gloo")  # systems that a job would use, so their cost on a node counts
_PARTS = 10


@dataclass(frozen=True, kw_only=True)
class AllreduceCase(ClusterCase):
    """Allreduces of one size after the other."""

    bytes: Sizes = (25_600_000,)
    dtype: DType = "fp32"
    offers: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.dtype}"

    @property
    def size(self) -> int:
        return max(self.bytes)

    def factories(self) -> Factories:
        from thalweg_bench.collectives import factories, make_pattern

        return factories(make_pattern(self.size, self.dtype))

    def run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster, gloo="gloo" in self.peers)
            found = []
            for size in self.bytes:
                of_size = replace(self, bytes=(size,))
                of_size.open(cluster, size)
                found.append(of_size.measure(cluster))
                cluster.call("close")
        return Outcome.joined(found)

    def measure(self, cluster: Cluster) -> Outcome:
        """Measures the one size, whose systems are open."""
        raise NotImplementedError

    def round_bytes(self) -> dict[str, float]:
        """Returns the payload in and out of one process in one round, by kind."""
        shape, size = self.shape, self.size
        if shape.local:
            # At one byte per second the bound in seconds is what the busiest node carries in bytes.
            carried = replace(shape, slow_node=1).exchange_bound(size, 8) or 0.0
            return {"aggregator": 2 * carried, "sidecar": 2 * carried, "worker": 2 * size}
        return {
            # Every node sends its share of the wire bytes to each shard and receives as many.
            "aggregator": 2 * shape.nodes * size / max(1, shape.shards),
            # Embedded, nothing leaves the sidecar: what its workers submit and receive counts.
            "sidecar": 2 * (size if shape.shards else size * shape.workers),
            "worker": 2 * size,
        }


@dataclass(frozen=True, kw_only=True)
class LabCase(AllreduceCase):
    """one allreduce, of each of some sizes

    --resources writes for each kind of process CPU-seconds per GB of payload in and out, peak
    memory and megabytes sent; and the same of a node with all its workers, beside Gloo's.

    examples:
      thalweg bench lab --nodes 4 --shards 4 --rate 250mbit --bytes 25600000 --peers gloo,iperf3
      thalweg bench lab --nodes 4 --shards 0 --local-shards 1 --slow-node 4
      thalweg bench lab --nodes 1 --workers 2 --shards 0 --rate none --peers gloo,memcpy
    """

    peers: Annotated[tuple[str, ...], peers("gloo", "iperf3", "memcpy")] = ("gloo",)
    resources: Resources = None

    def measure(self, cluster: Cluster) -> Outcome:
        usages = {system: cluster.usage() for system in self.systems if system in _TRAINING}
        times = self.take_turns(cluster, usages)
        used = usages["thalweg"].report(self.name, self.round_bytes())
        for system, usage in usages.items():
            used.append(usage.per_node(self.name, system, self.size, self.shape.nodes))
        return Outcome(self.rows(times), used)


@dataclass(frozen=True, kw_only=True)
class LatencyCase(AllreduceCase):
    """p50 and p99 of small allreduces

    The rows' smallest and largest times are percentiles of single repeats.
    """

    shape: Shape = UNSHAPED
    bytes: Sizes = (4096,)
    peers: Annotated[tuple[str, ...], peers("gloo")] = ("gloo",)
    count: Annotated[int, number(1, 100_000, "in each repeat")] = 200

    def measure(self, cluster: Cluster) -> Outcome:
        runs: dict[str, list[list[float]]] = {system: [] for system in self.systems}
        for repeat in range(self.repeats + 1):
            for system in self.systems:
                bound = self.bound(system, self.shape.rate)
                seconds = cluster.measure_many(system, self.count, bound)
                turn = f"{repeat}/{self.repeats}" if repeat else "warm-up"
                say(f"{turn} {system}: p50 {percentile(seconds, 50) * 1e3:.3f} ms")
                if repeat > 0:
                    runs[system].append(seconds)
        return Outcome(self.percentiles(runs))

    def percentiles(self, runs: dict[str, list[list[float]]]) -> list[Row]:
        """Makes rows: the percentile of all allreduces, with a repeat's lowest and highest."""
        rows = []
        for percent in (50, 99):
            for system, repeats in runs.items():
                everything = [seconds for repeat in repeats for seconds in repeat]
                each = [percentile(repeat, percent) for repeat in repeats]
                middle, name = percentile(everything, percent), f"{self.name} p{percent}"
                rows.append(Row(name, system, self.size, middle, min(each), max(each), None))
        return rows


@dataclass(frozen=True, kw_only=True)
class SoakCase(AllreduceCase):
    """time and memory of many small allreduces

    There are two rows, of the first tenth of them and of the others; --resources writes the memory
    after each.
    """

    shape: Shape = UNSHAPED
    bytes: Sizes = (65_536,)
    count: Annotated[int, number(10, 1_000_000)] = 10_000
    resources: Resources = None

    def measure(self, cluster: Cluster) -> Outcome:
        outcome, part, name = Outcome([], []), self.count // _PARTS, self.name
        for first, last in ((0, part), (part, part * _PARTS)):
            seconds: list[float] = []
            usage = cluster.usage()
            usage.start()
            for done in range(first + part, last + 1, part):
                seconds += cluster.measure_many("thalweg", part, self.slowest)
                say(f"{done}/{part * _PARTS} steps")
            usage.stop(rounds=last - first)
            steps = f"{name}, steps {first + 1} to {last}"
            outcome.rows.append(make_row(steps, "thalweg", self.size, seconds, None))
            outcome.resources.extend(usage.report(steps, self.round_bytes(), rss_mb))
        return outcome
