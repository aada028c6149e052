"""Knows which workers of a node wait for others of it to hand over a gradient, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

from thalweg.node._words import SILENCES

_SHARE = 0.9  # of the step's timeout, as a sidecar tolerates
_LOOKS = 20  # per timeout of a step: followers report within one, a leader decides within another
_LONGEST_LOOK = 1.0  # seconds


def look_interval(timeout: float, step_timeout: float) -> float:
    """Returns after how many seconds a worker of the node looks again for what no event tells."""
    return min(timeout / SILENCES, step_timeout / _LOOKS, _LONGEST_LOOK)


class Waits:
    """Each worker's last wait for a bucket of its node. Buckets are numbered by their results."""

    def __init__(self, ranks: Iterable[int], step_timeout: float) -> None:
        """`ranks` are those of the node's workers in the job, the leader's first."""
        self._ranks = tuple(ranks)
        self._tolerated = _SHARE * step_timeout
        self._waits: dict[int, tuple[int, float]] = {}

    @property
    def leader(self) -> int:
        return self._ranks[0]

    def note(self, rank: int, number: int, since: float) -> None:
        """Notes since when a worker that has handed over bucket `number` waits for its result."""
        self._waits[rank] = number, since

    def late(self, number: int, now: float) -> str:
        """Returns who has not come to bucket `number`, if others have waited for too long."""
        came = {rank: since for rank, (at, since) in self._waits.items() if at == number}
        missing = [rank for rank in self._ranks if rank not in came]
        if not came or not missing or now - min(came.values()) <= self._tolerated:
            return ""
        return (
            f"thalweg: rank {_list(missing)} did not hand over a gradient, for which "
            f"rank {_list(sorted(came))} of the same node waits, within {self._tolerated:g} s; if "
            "that is a long but healthy pause, raise the timeout (THALWEG_STEP_TIMEOUT)"
        )


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
