"""When shards take snapshots of what they keep."""

from __future__ import annotations

import time

from thalweg import _C

_PAUSE = 0.05  # seconds between two questions to shards that still write


class Snapshots:
    """The snapshots of a job, from one worker's side."""

    def __init__(self, every: int, *, is_first: bool) -> None:
        """One is taken after each `every` updates: the first worker asks the shards for it."""
        self._every = every
        self._is_first = is_first
        self._next = 0  # updates after which the next one is due
        # Tells snapshots of the same step apart: it grows when the job goes back, and when shards
        # get other weights.
        self.branch = 0

    def note_new_state(self, updates: int) -> None:
        """The shards have got weights from a worker, after so many updates."""
        self._next = updates
        self.branch += 1

    def is_due(self, updates: int) -> bool:
        """Whether this worker should take() one after so many updates."""
        return self._is_first and updates >= self._next

    def take(self, session: _C.Session, updates: int) -> None:
        """Is called after so many updates, before anything of the next one is pushed. While shards
        still write an earlier snapshot, the next one is put off. Raises RuntimeError.
        """
        if session.take_snapshot(self.branch, updates):
            self.go_on_from(updates)

    def go_on_from(self, updates: int) -> None:
        """There is a snapshot after so many updates."""
        self._next = updates - updates % self._every + self._every


def why_no_way_back(timeout: float, step_timeout: float, reconnect: float) -> str:
    """Returns why a job may end instead of going back to a snapshot; empty: it does go back. These
    are THALWEG_TIMEOUT, THALWEG_STEP_TIMEOUT and THALWEG_RECONNECT.
    """
    patience = 0.9 * min(timeout, step_timeout)  # of sidecars; docs/architecture.md
    if patience > reconnect:
        return ""
    return (
        f"an aggregator that is away for {patience:g} s ends the job, which does not go back to a "
        f"snapshot then: let THALWEG_RECONNECT, {reconnect:g} s, be less than nine tenths of "
        f"THALWEG_TIMEOUT, {timeout:g} s, and THALWEG_STEP_TIMEOUT, {step_timeout:g} s"
    )


def restore(session: _C.Session, seen: int, timeout: float) -> int | None:
    """Lets the shards restore the latest snapshot that all have, after `seen` updates at most.
    Returns after how many; None: there is none. Raises RuntimeError.
    """
    deadline = time.monotonic() + timeout
    is_writing, known = session.snapshots()
    while is_writing:
        if time.monotonic() > deadline:
            raise RuntimeError(f"thalweg: shards still wrote a snapshot after {timeout:g} s")
        time.sleep(_PAUSE)
        is_writing, known = session.snapshots()
    known = [(branch, step) for branch, step in known if step <= seen]
    if not known:
        return None
    session.restore_snapshot(*known[-1])
    return known[-1][1]
