"""Says in a line, when a job ends, what its codec has saved, by bytes and by the measured links."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from thalweg._attach import _stats
from thalweg._settings import _config, _logging

_PREDICTION = re.compile(r"100 MB take (\S+) s, (?:(\S+) times )?as long as in a ring")
_PREDICTED_BYTES = 1e8


class Links(NamedTuple):
    """Seconds that a byte takes, as the sidecar predicts it from the links that it has measured."""

    ours: float  # of encoded gradient, with this job's shards
    ring: float  # of gradient, in a ring of the nodes

    @classmethod
    def of(cls, placement: str) -> Links | None:
        """Reads the words of docs/placement.md; None: they predict nothing."""
        found = _PREDICTION.search(placement)
        if found is None:
            return None
        ours, times = (float(group or 1) for group in found.groups())
        return cls(ours / _PREDICTED_BYTES, ours / times / _PREDICTED_BYTES)


class Size(NamedTuple):
    """The size of a job."""

    nodes: int
    workers: int


def describe(stats: Mapping[str, float], placement: str, size: Size) -> str:
    """Returns the line; empty: no gradient was averaged."""
    if not stats["rounds"]:
        return ""
    raw, sent = stats["raw_bytes"], stats["wire_bytes_sent"]
    if size.nodes == 1:
        return (
            f"{raw / 1e6:.1f} MB of gradients, nothing saved: all {size.workers} workers are on "
            "one node, and nothing crosses a network there"
        )
    saved = _stats.compared(raw, sent)
    if not saved and not _stats.compresses(stats):
        saved = " (nothing was compressed)"  # a user may not know the default of `start`
    said = f"crossed a node's link as {sent / 1e6:.1f} MB{saved}"
    if size.nodes > 2 and f"{stats['link_bytes_sent'] / 1e6:.1f}" != f"{sent / 1e6:.1f}":
        link = f"{stats['link_bytes_sent'] / 1e6:.1f} MB"
        said = (
            f"were sent as {sent / 1e6:.1f} MB{saved}; with the sums of its shard, which other "
            f"nodes get, a node's link carried {link}"
        )
    parts = [
        f"{raw / 1e6:.1f} MB of gradients {said}",
        f"waited {stats['total_seconds']:.2f} s for averages (a sum over buckets, which overlap)",
    ]
    if links := Links.of(placement):
        # Plain DDP's ring goes through all workers, and once over each node's link.
        n, w = size
        ring = links.ring * ((w - 1) / w) / ((n - 1) / n)
        parts.append(
            f"by the measured links its bytes take {links.ours * sent:.2g} s, and those of plain "
            f"DDP would have taken {ring * raw:.2g} s"
        )
    return "; ".join(parts)


def farewell(
    job: str,
    stats: Callable[[], Mapping[str, float]],
    placement: Callable[[], str],
    size: Size,
) -> None:
    """Logs the line, also where the script has not set up logging."""
    try:
        text = describe(stats(), placement(), size)
    except RuntimeError:  # the session has gone, with whatever has ended it
        return
    if text:
        _logging.prepare(_config.log_level()).log(logging.INFO, "job %s: %s", job, text)
