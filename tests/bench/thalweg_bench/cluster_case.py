"""Defines measurements in which systems take turns in the workers of one cluster."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from thalweg._settings._config import ConfigError
from thalweg_bench import iperf
from thalweg_bench.case import Case, run_alternating
from thalweg_bench.cluster import SETUP_SECONDS, Cluster, check_installed
from thalweg_bench.resources import Usage
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.shape import FOUR_NODES, Shape

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories


@dataclass(frozen=True, kw_only=True)
class ClusterCase(Case):
    """Every node and aggregator gets a network namespace and a link of the given rate."""

    shape: Shape = FOUR_NODES
    peers: tuple[str, ...] = ()
    codec: str = "fp32"
    offers: ClassVar[bool] = False  # whether sidecars must be told to host shards; attach() does so

    def check(self) -> None:
        self.shape.check()
        if "iperf3" in self.peers:
            if self.shape.shards == 0 and not self.shape.local:
                raise ConfigError("--peers iperf3 sends to an aggregator: give --shards 1 or more")
            iperf.check_installed()
        check_installed()

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The bytes of a worker's gradients."""
        raise NotImplementedError

    @property
    def systems(self) -> tuple[str, ...]:
        return ("thalweg", *self.peers)

    def factories(self) -> Factories:
        """Returns what makes the systems in the workers; called once torch is imported."""
        raise NotImplementedError

    def bound(self, system: str, rate: float | None) -> float | None:
        """Returns a system's least time over links that carry `rate`; None: there is no bound."""
        if system == "iperf3":  # it measures the rate
            return None if self.shape.rate is None else self.size * 8 / self.shape.rate
        if system == "thalweg":
            return self.shape.exchange_bound(self.size, rate)
        return self.shape.ring_bound(self.size, rate) if system in ("gloo", "ddp") else None

    @property
    def slowest(self) -> float | None:
        """The slowest bound of all systems at the nominal rate, for the watchdog."""
        bounds = [self.bound(system, self.shape.rate) for system in self.systems]
        return max((bound for bound in bounds if bound is not None), default=None)

    def cluster(self, **options: bool) -> Cluster:
        return Cluster(self.shape, self.codec, **options)

    def start(self, cluster: Cluster, *, gloo: bool = True) -> None:
        """Starts the workers, with torch's process group over Gloo if asked for."""
        say(f"{self.name}, {self.size} bytes")
        cluster.start(self.factories, gloo=gloo)

    def open(self, cluster: Cluster, *arguments: object, seconds: float = SETUP_SECONDS) -> None:
        for system in self.systems:
            if system != "iperf3":
                say(f"{system}: opening")
                cluster.open(system, *arguments, seconds=seconds, offers=self.offers)

    def take_turns(
        self, cluster: Cluster, usages: Mapping[str, Usage] | None = None
    ) -> dict[str, list[float]]:
        """Measures the systems in turns; adds to the usages except in the first turn."""
        slowest = self.slowest

        def once(system: str, repeat: int) -> float:
            if system == "iperf3":
                target = (cluster.shards or cluster.nodes[1:])[0]
                goodput = iperf.measure_goodput(cluster.lab, cluster.nodes[0], target)
                return self.size * 8 / goodput
            usage = (usages or {}).get(system) if repeat > 0 else None
            return cluster.measure(system, repeat, slowest, usage)

        # iperf3 comes first: its rate is that of the following turns.
        order = sorted(self.systems, key=lambda system: system != "iperf3")
        return run_alternating(order, self.repeats, once)

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Makes a row for each system. Bounds come from iperf3's rate, else from the nominal
        one.
        """
        rate = self.rate_of(times)
        order = [system for system in self.systems if system in times]
        return [make_row(self.name, s, self.size, times[s], self.bound(s, rate)) for s in order]

    def rate_of(self, times: Mapping[str, Sequence[float]]) -> float | None:
        if times.get("iperf3"):
            return self.size * 8 / statistics.median(times["iperf3"])
        return self.shape.rate
