"""Leaves a job when what is on its way has come: other nodes wait for this one's part in it."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING

from thalweg._job import _failing
from thalweg._settings import _logging
from thalweg.ps._some import some

if TYPE_CHECKING:
    from thalweg import _C
    from thalweg.ps._arrivals import Arrivals


def leaving(
    owner: object, session: _C.Session, arrivals: Arrivals, *, keeps: bool
) -> weakref.finalize[..., object]:
    """Returns what ends a session: it is called, or runs when the owner or this process ends.

    With `keeps`, shards drop the snapshots of a job that all workers leave: a worker that fails
    does not leave it, but fails the job.
    """
    if keeps:
        _failing.note_failures()
    return weakref.finalize(owner, _leave, session, os.getpid(), arrivals, keeps)


def _leave(session: _C.Session, pid: int, arrivals: Arrivals, keeps: bool) -> None:
    """Does so in the process that has begun the session: a forked child must not touch it."""
    if os.getpid() != pid:
        return
    is_over = session.status() is not None
    overtaken = arrivals.leave()
    if keeps and _failing.is_failing():
        session.abort()
    session.close()
    if overtaken and not is_over:
        _logging.say(
            logging.WARNING,
            f"{some(overtaken)} has been changed while the weights of the last step were on their "
            "way, and stays without that step",
        )
