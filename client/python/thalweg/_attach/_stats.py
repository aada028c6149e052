"""Describes State.stats() in words."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg._attach._left_out import NOTHING, LeftOut
from thalweg.codecs import WIRE_TYPES

SECONDS = ("copy", "wait", "reduce", "decode", "wire", "total")
SAMPLES = ("error_ratio", "residual_norm")  # latest measurements, not sums


def ratio(raw: float, wire: float) -> float:
    """Returns how many times fewer bytes went over the wire."""
    return raw / wire if wire else 1.0


def compresses(stats: Mapping[str, float]) -> bool:
    """Returns whether anything has crossed the network compressed; samples exist from then on."""
    return stats["compressed_since"] > 0


def describe(
    codec: str,
    stats: Mapping[str, float],
    path: str,
    left_out: LeftOut = NOTHING,
    placement: str = "",
) -> str:
    """Returns what docs/summary.md explains line by line."""
    raw = stats["raw_bytes"]
    parts = [
        f"gradients: {stats['rounds']:.0f} buckets, {raw / 1e6:.1f} MB",
        f"path: {path}",
        *([f"placement: {placement}"] if placement else []),
        f"codec: {codec}{_since(codec, stats, left_out)}",
        *left_out.remarks,
        f"network: {_direction(stats, 'sent')}, {_direction(stats, 'received')}",
    ]
    if compresses(stats):
        parts.append(f"relative error: {stats['error_ratio']:.3g}{_meaning(codec, stats)}")
        parts.append(f"norm of the residual: {stats['residual_norm']:.3g}")
    if stats["loss_scale"]:
        skipped = f"skipped steps {stats['skipped_steps']:.0f}"
        parts.append(f"loss scale: {stats['loss_scale']:g}, {skipped}")
    parts += [
        "seconds: " + ", ".join(f"{name} {stats[f'{name}_seconds']:.2f}" for name in SECONDS),
        f"non-finite elements: {stats['nonfinite_elems']:.0f}",
    ]
    return "\n".join(parts)


def _since(codec: str, stats: Mapping[str, float], left_out: LeftOut) -> str:
    if codec in WIRE_TYPES or left_out.everything:
        return ""
    if not compresses(stats):
        return " (not compressing yet)"
    # The text counts iterations from 0, as a codec's `start` does.
    return f" since iteration {stats['compressed_since'] - 1:.0f}"


def _direction(stats: Mapping[str, float], name: str) -> str:
    wire = stats[f"wire_bytes_{name}"]
    return (
        f"{name} {wire / 1e6:.1f} MB{compared(stats['raw_bytes'], wire)}"
        if wire
        else (f"{name} nothing")
    )


def compared(raw: float, wire: float) -> str:
    """Returns " (2.00x less)", or " (…x more)"; "" where bytes on the wire are those of the
    gradients.
    """
    times = ratio(raw, wire)
    if f"{times:.2f}" == "1.00" or not times:
        return ""
    return f" ({times:.2f}x less)" if times > 1 else f" ({1 / times:.2f}x more)"


def _meaning(codec: str, stats: Mapping[str, float]) -> str:
    """Explains a large error: it is that of one step."""
    if stats["error_ratio"] < 0.5:
        return ""
    if "feedback=0" in codec:
        return " (feedback=0: what a step leaves out is lost)"
    return " (of one step: what it leaves out is held back and added to the next one)"
