"""How far apart nodes may be, whose optimizer is on the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from thalweg._job import _collectives

if TYPE_CHECKING:
    from thalweg.ps._joining import Joined

_SERIES_BIT = 40  # of numbers of settings, as shards know them

_MODES = ("sync", "stale", "async")
_MOST = 64  # steps apart
_LATE = ("keep", "drop")
_LONGEST = 24 * 3600.0  # seconds


class Pace(NamedTuple):
    """Who waits for whom. ServerOptimizer says what its arguments mean."""

    ahead: int = 0  # steps, of the fastest node before the slowest
    alone: bool = False  # each node's gradient is an update
    delay_aware: bool = False
    quorum: int = 0  # nodes for which an update waits; 0: all
    grace: float | None = 0.0  # seconds that it waits for the others; None: as measured
    drops_late: bool = False

    @property
    def is_together(self) -> bool:
        """Whether all nodes get each update's weights."""
        return not self.ahead and not self.has_own_rounds

    @property
    def has_own_rounds(self) -> bool:
        """Whether each node numbers its rounds, and its settings, by itself."""
        return self.alone or self.quorum > 0

    @classmethod
    def of(cls, mode: str, staleness: int | None, *, delay_aware: bool) -> Pace:
        """Raises ValueError where the arguments do not fit."""
        if mode not in _MODES:
            raise ValueError(f"thalweg: mode is {mode!r}, expected {', '.join(_MODES)}")
        if (mode == "stale") != (staleness is not None):
            raise ValueError(
                f"thalweg: mode is {mode!r} and staleness {staleness}: a number of steps goes with "
                'mode="stale", and only with it'
            )
        if staleness is not None and not 0 <= staleness <= _MOST:
            raise ValueError(f"thalweg: staleness is {staleness}, expected 0 to {_MOST}")
        if delay_aware and mode != "async":
            raise ValueError(f'thalweg: delay_aware goes with mode="async", not with {mode!r}')
        return cls(staleness or 0, mode == "async", delay_aware)

    @classmethod
    def of_quorum(cls, quorum: int | None, grace: float | None, late: str) -> Pace:
        """Raises ValueError where the arguments of LocalOptimizer do not fit."""
        if late not in _LATE:
            raise ValueError(f"thalweg: late is {late!r}, expected {', '.join(_LATE)}")
        if grace is not None and not 0 <= grace <= _LONGEST:
            raise ValueError(
                f"thalweg: grace is {grace} seconds, expected 0 to {_LONGEST:g}, or None to follow "
                "what is measured"
            )
        if quorum is None:
            if grace is not None or late != "keep":
                raise ValueError(
                    "thalweg: grace and late say what becomes of nodes that a quorum= "
                    "does not wait for: without one nobody is late"
                )
            return cls()
        if quorum < 1:
            raise ValueError(f"thalweg: quorum is {quorum}, expected 1 node or more")
        return cls(quorum=quorum, grace=grace, drops_late=late == "drop")


class Apart(NamedTuple):
    """A worker among others whose steps may be others."""

    meeting: _collectives.Meeting
    series: int  # settings are numbered from there on

    @classmethod
    def of(cls, pace: Pace, joined: Joined) -> Apart | None:
        """Returns None where all nodes are in the same step."""
        if pace.is_together:
            return None
        meeting = joined.meeting._replace(
            timeout=joined.step_timeout / 2,  # of which workers wait twice as long
            where="the others, before weights are written or all are given the same",
            variable="THALWEG_STEP_TIMEOUT",
        )
        return cls(meeting, joined.job.place.node + 1 << _SERIES_BIT if pace.has_own_rounds else 0)

    def meet(self) -> None:
        """Returns when all workers have called it. Raises TimeoutError, naming those missing."""
        _collectives.gather(None, self.meeting)
