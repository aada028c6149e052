"""`thalweg bench codec`: encoding and decoding all gradients of a model, without a network."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from thalweg.bench.codec_rounds import CodecRounds
from thalweg.bench.compression import compressed_bytes, passes, shorten
from thalweg.bench.lab_case import run_alternating
from thalweg.bench.rows import Row, count, make_row
from thalweg.bench.shapes import Shape, count_elements
from thalweg.codecs import Codec, PowerSGD

_ROWS = ("thalweg", "torch", "memcpy")


@dataclass(frozen=True)
class CodecCase:
    codec: Codec
    model: str  # what the shapes are called
    shapes: list[Shape]
    threads: int
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.model}, {shorten(self.codec)}, {count(self.threads, 'thread')}"

    @property
    def size(self) -> int:
        """Bytes of the gradients."""
        return 4 * count_elements(self.shapes)


def run(case: CodecCase, program: Path) -> list[Row]:
    """Raises BenchError."""
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
    # Both are read when torch is loaded.
    os.environ["OMP_NUM_THREADS"] = str(case.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from thalweg.bench.codec_torch import TorchRounds

    assert isinstance(case.codec, PowerSGD)
    peer = TorchRounds(case.codec, case.shapes, case.threads)
    stack.callback(peer.close)
    return peer.run


def make_rows(case: CodecCase, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """The bound of both: passes over the compressed gradients, as fast as memcpy moves bytes."""
    copied = 2 * case.size / statistics.median(times["memcpy"])
    bound = passes(case.codec) * compressed_bytes(case.codec, case.shapes) / copied
    return [
        make_row(case.name, name, case.size, times[name], None if name == "memcpy" else bound)
        for name in _ROWS
        if name in times
    ]
