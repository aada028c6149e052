"""Measures an optimizer step over parameters of a given number, type and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from thalweg._settings._config import ConfigError
from thalweg.codecs import WIRE_TYPES
from thalweg_bench.case import Case, Outcome
from thalweg_bench.options import Norm, number, one_of, peers
from thalweg_bench.rows import Row, count, make_row

MASTERS = "torch-masters"  # makes moments of half-precision parameters float32 in torch
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}
_STATES = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2}


@dataclass(frozen=True, kw_only=True)
class OptimCase(Case):
    """one step of a fused optimizer

    All systems step in turns, on parameters of their own, with torch's number of threads
    (OMP_NUM_THREADS). bound_s: the least bytes a step can move, at the rate of a triad that takes
    its turns as well. torch is its fused optimizer, whose moments are in the parameters' type; for
    lamb, which torch does not have, one written in torch's foreach operations; torch-masters keeps
    float32 moments of fp16 and bf16 as torch can, by masters. With O2, torch's side is apex's
    sequence: gradients made float32, checked and divided, the same step on masters, roundings.

    examples:
      thalweg bench optim --optimizer adamw --numel 32000000 --peers torch --json rows.json
      thalweg bench optim --param-dtype bf16
      thalweg bench optim --numel 1000000 --tensors 1000
    """

    optimizer: Annotated[str, one_of(_STATES)] = "adamw"
    param_dtype: Annotated[str, one_of(WIRE_TYPES, "of parameters and gradients")] = "fp32"
    opt_level: Annotated[
        str, one_of(("O0", "O2"), "O2: from fp16 gradients to fp16 parameters, by fp32 masters")
    ] = "O0"
    numel: Annotated[int, number(1, 1 << 31, "in all tensors")] = 32_000_000
    tensors: Annotated[int, number(1, 100_000)] = 1
    max_grad_norm: Norm = None
    repeats: Annotated[int, number(1, 1000)] = 11
    peers: Annotated[tuple[str, ...], peers("torch", MASTERS)] = ("torch",)

    @property
    def mixed(self) -> bool:
        return self.opt_level == "O2"

    def check(self) -> None:
        if self.tensors > self.numel:
            raise ConfigError(
                f"--tensors {self.tensors} is more than --numel {self.numel}: give fewer"
            )
        if self.optimizer == "lamb" and self.param_dtype != "fp32" and self.peers:
            raise ConfigError("torch's side of lamb is in fp32 only: give --peers ''")
        if self.optimizer == "lamb" and self.max_grad_norm is not None:
            raise ConfigError("lamb clips to 1 always: leave out --max-grad-norm")
        if self.mixed and (self.param_dtype != "fp32" or self.max_grad_norm is not None):
            raise ConfigError(
                "O2 has fp16 parameters, and is measured without clipping: leave out --param-dtype "
                "and --max-grad-norm"
            )
        if MASTERS in self.peers and self.param_dtype == "fp32":
            raise ConfigError(f"fp32 parameters need no masters: leave out {MASTERS} of --peers")

    @property
    def name(self) -> str:
        dtype = "O2" if self.mixed else self.param_dtype
        clipped = "" if self.max_grad_norm is None else f", clipped to {self.max_grad_norm:g}"
        return (
            f"{self.optimizer} {dtype}, {self.numel:,} in {count(self.tensors, 'tensor')}{clipped}"
        )

    @property
    def bytes_moved(self) -> int:
        """The least bytes: each array read once, and written once if it changes.

        Clipping reads gradients once more, for their norm. LAMB does so, and does not write
        parameters before it has read them and the moments once more, for the trust ratio: 44 bytes
        in float32. O2 reads gradients twice as well, to check whether they are finite, but both
        times in float16, and stores parameters in float16 beside their masters.
        """
        if self.mixed:
            lamb = 12 if self.optimizer == "lamb" else 0
            return (2 * 2 + 8 + 8 * _STATES[self.optimizer] + 2 + lamb) * self.numel
        width = _WIDTHS[self.param_dtype]
        per_element = 3 * width + 8 * _STATES[self.optimizer]
        if self.optimizer == "lamb":
            per_element += 2 * width + 8
        elif self.max_grad_norm is not None:
            per_element += width
        return per_element * self.numel

    def run(self) -> Outcome:
        from thalweg_bench.optim_step import measure

        return Outcome(self.rows(*measure(self)))

    def rows(self, times: Mapping[str, Sequence[float]], triad_bytes: int) -> list[Row]:
        """Makes rows. The bound is the bytes of a step at the rate of the fastest triad."""
        bound = self.bytes_moved * min(times["triad"]) / triad_bytes
        return [
            make_row(self.name, "triad", triad_bytes, seconds, None)
            if system == "triad"
            else make_row(self.name, system, self.bytes_moved, seconds, bound)
            for system, seconds in times.items()
        ]
