"""`thalweg bench predict` compares intervals of local updates with what advice says of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from thalweg.cli._local_advice import exchange_seconds
from thalweg.codecs import parse
from thalweg_bench import ps_case
from thalweg_bench.cluster import Shape
from thalweg_bench.compression import wire_bytes
from thalweg_bench.lab import format_rate
from thalweg_bench.ps_case import PsCase
from thalweg_bench.rows import Row
from thalweg_bench.shapes import shapes_of

_NODES = (2, 4)
_RATES = (50_000_000, 100_000_000, 250_000_000)
_CODECS = ("fp32", "bf16")


@dataclass(frozen=True)
class Prediction:
    """An interval of so many steps, each with work, and an exchange at its end."""

    nodes: int
    rate: int
    codec: str
    model: str
    steps: int
    forward_seconds: float

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {format_rate(self.rate)}, {self.codec}"

    @property
    def case(self) -> PsCase:
        shape = Shape(self.nodes, 0, 1, self.rate, self.codec, local=True)
        return _Alone(
            shape,
            self.model,
            self.steps,
            self.forward_seconds,
            clip=None,
            overlap=False,
            local=True,
            snapshot_every=0,
            peers=(),
            repeats=3,
        )

    @property
    def seconds(self) -> float:
        """Returns what `thalweg doctor` and `thalweg profile` would say."""
        size = wire_bytes(parse(self.codec), shapes_of(self.model))
        work = 3 * self.forward_seconds * self.steps  # a backward pass takes two forward passes
        return work + exchange_seconds(size, size, self.nodes, self.rate)


class _Alone(PsCase):
    """Local updates, and nothing beside them."""

    @property
    def systems(self) -> tuple[str, ...]:
        return ("local",)


def predictions(model: str, steps: int, forward_seconds: float) -> list[Prediction]:
    """Returns the twelve configurations. The formula has no number that was fitted to any."""
    return [
        Prediction(nodes, rate, codec, model, steps, forward_seconds)
        for nodes, rate, codec in product(_NODES, _RATES, _CODECS)
    ]


def run(asked: Sequence[Prediction]) -> list[Row]:
    """Measures all. Raises BenchError, LabError or ServerError."""
    return [row for each in asked for row in ps_case.run(each.case)]


def format_errors(asked: Sequence[Prediction], rows: Sequence[Row]) -> str:
    """Returns a table, and how far predictions are off in the median and at worst."""
    lines = [f"{'configuration':28} predicted  measured   error"]
    errors = []
    for each, row in zip(asked, rows, strict=True):
        error = 100 * (row.median_s / each.seconds - 1)
        errors.append(abs(error))
        lines.append(f"{each!s:28} {each.seconds:7.3f} s {row.median_s:7.3f} s {error:+6.1f}%")
    lines.append(f"off by {statistics.median(errors):.1f}% (median), {max(errors):.1f}% (worst)")
    return "\n".join(lines)
