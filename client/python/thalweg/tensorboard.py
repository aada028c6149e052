"""Writes statistics of a job to TensorBoard, or to any other writer of scalars.

    from torch.utils.tensorboard import SummaryWriter
    from thalweg.tensorboard import StatsWriter

    log = StatsWriter(state, SummaryWriter())
    for step in range(steps):
        ...
        log.write(step)

Scalars are what has happened since the write before.
"""

from __future__ import annotations

from typing import Protocol

from thalweg._attach import _stats

_SUMS = {
    "raw_bytes": "bytes/raw",
    "wire_bytes_sent": "bytes/sent",
    "wire_bytes_received": "bytes/received",
    "rounds": "buckets",
    "nonfinite_elems": "nonfinite_elements",
    "skipped_steps": "skipped_steps",
} | {f"{name}_seconds": f"seconds/{name}" for name in _stats.SECONDS}


class ScalarWriter(Protocol):
    """The needed part of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class Source(Protocol):
    """The needed part of thalweg.ddp.State."""

    def stats(self) -> dict[str, float]: ...


class StatsWriter:
    """Writes State.stats() as scalars below `prefix`. One thread at a time may use it.

    Bytes, buckets, seconds, non-finite elements and skipped steps are counted since the previous
    write, so that a change shows at its step. compression/sent and compression/received are the raw
    bytes of that time divided by those on the wire. Once compression has started, error_ratio and
    residual_norm are the latest samples; so is loss_scale once there is one. The figures are those
    of one worker and its node: write on one worker.
    """

    def __init__(self, state: Source, writer: ScalarWriter, prefix: str = "thalweg") -> None:
        self._state = state
        self._writer = writer
        self._prefix = prefix
        self._last: dict[str, float] = {}

    def write(self, step: int) -> None:
        stats = self._state.stats()
        new = {name: stats[name] - self._last.get(name, 0.0) for name in _SUMS}
        self._last = stats
        for name, value in new.items():
            self._add(_SUMS[name], value, step)
        for direction in ("sent", "received"):
            if wire := new[f"wire_bytes_{direction}"]:
                self._add(f"compression/{direction}", new["raw_bytes"] / wire, step)
        if _stats.compresses(stats):
            for name in _stats.SAMPLES:
                self._add(name, stats[name], step)
        if stats["loss_scale"]:
            self._add("loss_scale", stats["loss_scale"], step)

    def _add(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(f"{self._prefix}/{tag}", value, step)
