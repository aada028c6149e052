"""What State.stats() means, in words. Not every codec and version counts everything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from thalweg.codecs import WIRE_TYPES

SECONDS = ("copy", "wait", "reduce", "encode", "decode", "wire", "total")
SAMPLES = ("error_ratio", "residual_norm")  # not sums: the latest that was measured


def ratio(raw: float, wire: float) -> float:
    """How many times fewer bytes went over the wire."""
    return raw / wire if wire else 1.0


def known(stats: Mapping[str, float], name: str) -> bool:
    """Whether it has been counted or sampled."""
    return not math.isnan(stats.get(name, math.nan))


def describe(codec: str, stats: Mapping[str, float]) -> str:
    raw = stats["raw_bytes"]
    parts = [
        f"{stats['rounds']:.0f} buckets, {raw / 1e6:.1f} MB of gradients",
        f"codec {codec}{_since(codec, stats)}",
        f"{_direction(stats, 'sent')}, {_direction(stats, 'received')}",
    ]
    if known(stats, "error_ratio"):
        parts.append(f"relative error {stats['error_ratio']:.3g}")
    if known(stats, "residual_norm"):
        parts.append(f"norm of the residual {stats['residual_norm']:.3g}")
    seconds = [name for name in SECONDS if known(stats, f"{name}_seconds")]
    parts += [
        "seconds: " + ", ".join(f"{name} {stats[f'{name}_seconds']:.2f}" for name in seconds),
        f"non-finite elements: {stats['nonfinite_elems']:.0f}",
    ]
    return "; ".join(parts)


def _since(codec: str, stats: Mapping[str, float]) -> str:
    if codec in WIRE_TYPES or not known(stats, "first_compressed_round"):
        return ""
    first = stats["first_compressed_round"]
    if first == 0:
        return " (not compressing yet)"
    # Iterations are counted from 0, as in a codec's `start`.
    return f" since iteration {first - 1:.0f} ({stats['compressed_rounds']:.0f} buckets)"


def _direction(stats: Mapping[str, float], name: str) -> str:
    wire = stats[f"wire_bytes_{name}"]
    return f"{name} {wire / 1e6:.1f} MB ({ratio(stats['raw_bytes'], wire):.2f}x less)"
