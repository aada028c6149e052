"""Measures a DDP step with a model's parameters and hardly any computation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from thalweg._settings._config import ConfigError
from thalweg.codecs import Auto, PowerSGD, parse
from thalweg_bench.case import Outcome
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.compression import warm_up_steps, wire_bytes
from thalweg_bench.options import Model, Option, peers, step_codec
from thalweg_bench.rows import Row, make_row
from thalweg_bench.shapes import count_elements, shapes_of

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories


@dataclass(frozen=True, kw_only=True)
class StepCase(ClusterCase):
    """a DDP step

    The rows of communication are the step's times less that of a step without communication.

    examples:
      thalweg bench step --model bert-base --codec fp16 --peers ddp,torch-fp16
      thalweg bench step --rate 100mbit --codec powersgd:4 --peers ddp,torch-powersgd
    """

    codec: Annotated[
        str,
        Option(
            step_codec,
            "a type, a codec of blocks, or powersgd:rank=4,… or auto, which start at 2 unless they "
            "have start=…",
        ),
    ] = "fp32"
    model: Model = "resnet50"
    peers: Annotated[tuple[str, ...], peers("ddp", "torch-fp16", "torch-powersgd", "iperf3")] = (
        "ddp",
    )

    def check(self) -> None:
        codec = parse(self.codec)
        if "torch-powersgd" in self.peers:
            if not isinstance(codec, PowerSGD):
                raise ConfigError(
                    "--peers torch-powersgd does what --codec powersgd:… says: give one, got "
                    f"--codec {self.codec}"
                )
            if codec.rank == 2:
                raise ConfigError(
                    "--peers torch-powersgd gets wrong results at rank 2 from gradients of rank 1, "
                    "which are those measured here: give another rank"
                )
        super().check()

    @property
    def name(self) -> str:
        return f"{self.model}, {self.shape}, {self.codec}"

    @property
    def size(self) -> int:
        return 4 * count_elements(shapes_of(self.model))

    @property
    def systems(self) -> tuple[str, ...]:
        return ("local", "thalweg", *self.peers)

    def factories(self) -> Factories:
        from thalweg_bench.step import factories

        return factories(shapes_of(self.model))

    def bound(self, system: str, rate: float | None) -> float | None:
        codec, shapes = parse(self.codec), shapes_of(self.model)
        if system == "thalweg":  # of auto, the sidecars choose what it sends
            sent = None if isinstance(codec, Auto) else wire_bytes(codec, shapes)
            return None if sent is None else self.shape.exchange_bound(sent, rate)
        if system == "torch-fp16":
            return self.shape.ring_bound(self.size // 2, rate)
        if system == "torch-powersgd" and isinstance(codec, PowerSGD):
            # torch's hook sends the factors in the gradients' type.
            return self.shape.ring_bound(wire_bytes(replace(codec, wire="fp32"), shapes), rate)
        return super().bound(system, rate)

    def run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster)
            # A machine may have fewer cores than workers, and the steps before compression starts
            # take as long as plain DDP's.
            slowest = max(self.slowest or 0.0, self.bound("ddp", self.shape.rate) or 0.0)
            self.open(cluster, seconds=60 + 20 * slowest * (1 + warm_up_steps(parse(self.codec))))
            return Outcome(self.rows(self.take_turns(cluster)))

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Makes rows: the step, and the step less the time that it takes without communication."""
        rate, rows = self.rate_of(times), []
        for part, less in (("step", 0.0), ("communication", statistics.median(times["local"]))):
            for system in self.systems[1:]:
                seconds = [t - (0.0 if system == "iperf3" else less) for t in times[system]]
                bound = self.bound(system, rate)
                rows.append(make_row(f"{self.name} {part}", system, self.size, seconds, bound))
        return rows
