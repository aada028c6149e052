"""Measures how long all gradients of a model take to encode and decode, without a network."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from thalweg._settings._config import ConfigError
from thalweg.codecs import PowerSGD, parse
from thalweg_bench.case import Case, Outcome, run_alternating
from thalweg_bench.codec_rounds import PROGRAM, running
from thalweg_bench.compression import compressed_bytes, passes
from thalweg_bench.options import Option, Programs, TensorShapes, compressing_codec, names, number
from thalweg_bench.programs import find_programs
from thalweg_bench.rows import Row, count, make_row
from thalweg_bench.shapes import count_elements, parse_shapes


@dataclass(frozen=True, kw_only=True)
class CodecCase(Case):
    """encoding and decoding without a network

    All gradients lie in one bucket, on one node. Thalweg's time is that of everything its sidecar
    computes in a round, in the program thalweg-codec-rounds, which `make build` builds; torch's is
    that of its powerSGD_hook, from the call until its future is done. They take turns. bound_s: the
    least passes over the compressed gradients, seven for PowerSGD and four for the others, at the
    speed of memcpy.

    examples:
      thalweg bench codec --codec powersgd:4 --shapes resnet50 --json rows.json
      thalweg bench codec --codec powersgd:rank=8,wire=fp16 --shapes 768x768,3072x768 --peers ''
      thalweg bench codec --codec int8 --shapes bert-base
    """

    codec: Annotated[str, Option(compressing_codec, "powersgd or a lossy one")] = "powersgd:rank=4"
    shapes: TensorShapes = "resnet50"
    threads: Annotated[int, number(1, 256)] = 1
    peers: Annotated[
        tuple[str, ...] | None, names(("torch",), "default: torch for powersgd, all that it has")
    ] = None
    dir: Programs = Path("build/release")

    def check(self) -> None:
        if not find_programs(self.dir, PROGRAM):
            raise ConfigError(
                f"there is no program {PROGRAM} in {self.dir}: build first (make build), or give "
                "--dir"
            )
        if self.peers and not self._has_peer:
            raise ConfigError(f"torch has no {self.codec}: give --peers ''")

    @property
    def _has_peer(self) -> bool:
        return isinstance(parse(self.codec), PowerSGD)

    @property
    def name(self) -> str:
        return f"{self.shapes}, {self.codec}, {count(self.threads, 'thread')}"

    @property
    def size(self) -> int:
        """The bytes of the gradients."""
        return 4 * count_elements(parse_shapes(self.shapes))

    def run(self) -> Outcome:
        program = find_programs(self.dir, PROGRAM)[0]
        has_torch = self._has_peer if self.peers is None else "torch" in self.peers
        shapes, copies = parse_shapes(self.shapes), list[float]()
        with ExitStack() as stack:
            run_round = stack.enter_context(
                running(program, parse(self.codec).spec(), shapes, self.threads)
            )
            systems = {"torch": self._open_torch(stack)} if has_torch else {}

            def once(system: str, repeat: int) -> float:
                if system in systems:
                    return systems[system]()
                seconds, copy_seconds = run_round()
                if repeat > 0:
                    copies.append(copy_seconds)
                return seconds

            times = run_alternating(("thalweg", *systems), self.repeats, once)
        return Outcome(self.rows({**times, "memcpy": copies}))

    def _open_torch(self, stack: ExitStack) -> Callable[[], float]:
        # torch reads both when it is loaded.
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from thalweg_bench.codec_torch import TorchRounds

        codec = parse(self.codec)
        assert isinstance(codec, PowerSGD)
        peer = TorchRounds(codec, parse_shapes(self.shapes), self.threads)
        stack.callback(peer.close)
        return peer.run

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Makes rows. The bound is the passes over the compressed gradients at memcpy's rate."""
        codec, copied = parse(self.codec), 2 * self.size / statistics.median(times["memcpy"])
        bound = passes(codec) * compressed_bytes(codec, parse_shapes(self.shapes)) / copied
        return [
            make_row(self.name, system, self.size, seconds, None if system == "memcpy" else bound)
            for system, seconds in times.items()
        ]
