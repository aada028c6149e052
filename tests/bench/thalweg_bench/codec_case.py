"""`thalweg bench codec` encodes and decodes all gradients of a model without a network."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from thalweg.codecs import Codec, PowerSGD
from thalweg_bench.codec_rounds import CodecRounds
from thalweg_bench.compression import compressed_bytes, passes, shorten
from thalweg_bench.lab_case import run_alternating
from thalweg_bench.rows import Row, count, make_row
from thalweg_bench.shapes import Shape, count_elements

_ROWS = ("thalweg", "torch", "memcpy")


@dataclass(frozen=True)
class CodecCase:
    codec: Codec
    model: str  # name of the shapes
    shapes: list[Shape]
    threads: int
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.model}, {shorten(self.codec)}, {count(self.threads, 'thread')}"

    @property
    def size(self) -> int:
        """Returns the bytes of the gradients."""
        return 4 * count_elements(self.shapes)


def run(case: CodecCase, program: Path) -> list[Row]:
    """Runs the case. Raises BenchError."""
    with ExitStack() as stack:
        ours = stack.enter_context(
            CodecRounds(program, case.codec.spec(), case.shapes, case.threads)
        )
        copies: list[float] = []
        run_peer = _open_torch(case, stack) if "torch" in case.peers else None

        def once(system: str, repeat: int) -> float:
            if system == "torch":
                assert run_peer is not None
                return run_peer()
            done = ours.run()
            if repeat > 0:
                copies.append(done.copy_seconds)
            return done.seconds

        times = run_alternating(("thalweg", *case.peers), case.repeats, once)
    return make_rows(case, {**times, "memcpy": copies})


def _open_torch(case: CodecCase, stack: ExitStack) -> Callable[[], float]:
    # torch reads both when it is loaded.
    os.environ["OMP_NUM_THREADS"] = str(case.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from thalweg_bench.codec_torch import TorchRounds

    assert isinstance(case.codec, PowerSGD)
    peer = TorchRounds(case.codec, case.shapes, case.threads)
    stack.callback(peer.close)
    return peer.run


def make_rows(case: CodecCase, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Makes rows. The bound is the passes over the compressed gradients at memcpy's rate."""
    copied = 2 * case.size / statistics.median(times["memcpy"])
    bound = passes(case.codec) * compressed_bytes(case.codec, case.shapes) / copied
    return [
        make_row(case.name, name, case.size, times[name], None if name == "memcpy" else bound)
        for name in _ROWS
        if name in times
    ]
