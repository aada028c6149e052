"""Measures local updates beside what advice predicts of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from thalweg._settings._config import ConfigError
from thalweg.cli._local_advice import exchange_seconds
from thalweg.codecs import WIRE_TYPES, parse
from thalweg_bench.case import Outcome
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.compression import wire_bytes
from thalweg_bench.options import Forward, Model, number, one_of
from thalweg_bench.rows import format_table
from thalweg_bench.shape import HOSTED, Shape
from thalweg_bench.shapes import count_elements, shapes_of

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories


@dataclass(frozen=True, kw_only=True)
class LocalCase(ClusterCase):
    """local updates with AdamW, beside what advice predicts of them

    A run is an interval: steps that workers take alone, and then, but for the system `alone`, one
    exchange of what has changed. Every node hosts a shard, as in what `thalweg doctor` and
    `thalweg profile` say.

    example:
      thalweg bench local --nodes 4 --rate 50mbit --every 50 --forward 0.1
    """

    shape: Shape = HOSTED
    model: Model = "resnet50"
    every: Annotated[int, number(1, 1000, "steps of a run")] = 10
    forward: Forward = 0.1
    codec: Annotated[str, one_of(WIRE_TYPES, "both ways")] = "bf16"

    def check(self) -> None:
        if not self.shape.local or self.shape.shards or self.shape.rate is None:
            raise ConfigError(
                "advice is for nodes with shards in their sidecars and links of a known rate: give "
                "--local-shards 1 --shards 0 and --rate"
            )
        super().check()

    @property
    def name(self) -> str:
        work = f"{self.every} steps of {self.forward:g} + {2 * self.forward:g} s of work"
        return f"{self.model}, {self.shape}, {self.codec}, AdamW, {work}"

    @property
    def size(self) -> int:
        return 4 * count_elements(shapes_of(self.model))

    @property
    def systems(self) -> tuple[str, ...]:
        return ("alone", "local")

    def factories(self) -> Factories:
        from thalweg_bench.ps_step import factories

        return factories(self)

    def bound(self, system: str, rate: float | None) -> float | None:
        """Returns how long a run works, and then exchanges at the rate of the links."""
        work = 3 * self.forward * self.every  # a backward pass takes two forward passes
        return work + (0.0 if system == "alone" else self.exchange(rate))

    def exchange(self, rate: float | None) -> float:
        """Returns how many seconds advice says an exchange takes; no number in its formula was
        fitted to any measurement.
        """
        sent = wire_bytes(parse(self.codec), shapes_of(self.model))
        return exchange_seconds(sent, sent, self.shape.nodes, rate or float("inf"))

    def run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster)
            self.open(cluster, seconds=60 + 20 * (self.slowest or 0.0))
            times = self.take_turns(cluster)
        rows = self.rows(times)
        return Outcome(rows, text=f"{format_table(rows)}\n\n{self.advice(times)}")

    def advice(self, times: Mapping[str, Sequence[float]]) -> str:
        """Says what advice predicts from the time of steps alone, beside what was measured."""
        alone, measured = (statistics.median(times[system]) for system in self.systems)
        predicted = alone + self.exchange(self.shape.rate)
        off = 100 * (measured / predicted - 1)
        return (
            f"local: {off:+.1f}% from the {predicted:.3f} s that advice predicts, of which "
            f"{alone:.3f} s are steps"
        )
