"""Defines the shape of a cluster, and what its links need at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from thalweg._settings._config import ConfigError
from thalweg_bench.lab import format_rate
from thalweg_bench.options import Option, flag, number, read_rate
from thalweg_bench.rows import count


@dataclass(frozen=True)
class Shape:
    nodes: Annotated[int, number(1, 64)] = 4
    shards: Annotated[int, number(0, 64, "0: the sidecar of the only node aggregates")] = 4
    workers: Annotated[int, number(1, 16, "per node")] = 1
    rate: Annotated[
        int | None, Option(read_rate, "of every link, such as 1gbit; none", show=format_rate)
    ] = 250_000_000  # bits per second
    local_shards: Annotated[
        int, number(0, 1, "1: every sidecar hosts a shard, beside those of --shards")
    ] = 0
    slow_shard: Annotated[int, number(1, 100, "the last shard's link has 1/N of the rate")] = 1
    slow_node: Annotated[int, number(1, 100, "the last node's link has 1/N of the rate")] = 1
    weighted: Annotated[
        bool, flag("the shards' weights say that one is slow, and not what nodes measure")
    ] = False

    def __str__(self) -> str:
        workers = "" if self.workers == 1 else f" x {self.workers} workers"
        shards = "embedded" if self.shards == 0 else count(self.shards, "shard")
        if self.slow_shard > 1:
            how = ", weighted" if self.weighted else ""
            shards += f" (one at 1/{self.slow_shard}{how})"
        if self.local:
            shards = f"local + {self.shards} shards"
        slow = f" (one at 1/{self.slow_node})" if self.slow_node > 1 else ""
        return f"{count(self.nodes, 'node')}{slow}{workers}, {shards}, {format_rate(self.rate)}"

    def check(self) -> None:
        """Raises ConfigError for an impossible shape."""
        if self.shards == 0 and self.nodes != 1 and not self.local:
            raise ConfigError(
                f"--shards 0 is for one node, got --nodes {self.nodes}: nodes need a shard to meet "
                "at; give --local-shards 1"
            )
        if self.local and self.nodes == 1:
            raise ConfigError("--local-shards 1 is for several nodes: give --nodes")
        if self.slow_node > 1 and (self.nodes < 2 or self.rate is None or not self.local):
            raise ConfigError(
                "--slow-node makes one link of several slow: give --nodes 2, --rate, "
                "--local-shards 1"
            )
        if self.slow_shard > 1 and (self.shards < 2 or self.rate is None):
            raise ConfigError(
                "--slow-shard makes one link of several slow: give --shards 2 and --rate"
            )
        if self.weighted and self.slow_shard == 1:
            raise ConfigError("--weighted is about a slow shard: give --slow-shard as well")

    @property
    def local(self) -> bool:
        """Whether every sidecar hosts a shard."""
        return self.local_shards == 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.workers

    def exchange_bound(self, wire_bytes: float, rate: float | None) -> float | None:
        """Returns Thalweg's bound over links that carry `rate`: each node sends and receives its
        gradients once, at the same time.

        A shard's link carries nodes/shards times as much as a node's. One shard's link may be
        slower; every other shard then sums more than that one, by the same factor.
        """
        if self.local:
            return self._hosted_bound(wire_bytes, rate)
        if rate is None or self.shards == 0:
            return None
        parts = self.slow_shard * (self.shards - 1) + 1
        return wire_bytes * 8 / rate * max(1.0, self.nodes * self.slow_shard / parts)

    def _hosted_bound(self, wire_bytes: float, rate: float | None) -> float | None:
        """Returns the bound where every node hosts a shard too, and all share the sums as well as
        can be.

        A node that sums x bytes carries wire_bytes + (nodes - 2)·x in each direction, another shard
        nodes·x.
        """
        nodes = self.nodes
        if rate is None or nodes < 2:
            return None
        node_rates = [rate / 8] * (nodes - 1) + [rate / 8 / self.slow_node]

        def summed_within(seconds: float) -> float:
            spare = [seconds * r - wire_bytes for r in node_rates]
            if min(spare) < 0:
                return -1.0
            most = (min(wire_bytes, s / (nodes - 2)) if nodes > 2 else wire_bytes for s in spare)
            return sum(most) + self.shards * seconds * rate / 8 / nodes

        low, high = 0.0, 2 * nodes * wire_bytes / min(node_rates)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if summed_within(middle) >= wire_bytes else (middle, high)
        return high

    def ring_bound(self, size: float, rate: float | None) -> float | None:
        """Returns the bound of a ring allreduce: every rank sends 2·(N-1)/N of the bytes to its
        successor.

        Ranks of a node are neighbours in the ring, so that it leaves each node once and enters it
        once, however many workers the node has: a link carries what one rank sends.
        """
        if rate is None or self.nodes < 2:
            return None
        return 2 * (self.ranks - 1) / self.ranks * size * 8 / rate


FOUR_NODES = Shape()
UNSHAPED = Shape(rate=None)
HOSTED = Shape(shards=0, local_shards=1)
