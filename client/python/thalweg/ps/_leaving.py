"""Leaves a job when what is on its way has come: other nodes wait for this one's part in it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from thalweg._settings import _logging
from thalweg.ps._some import some

if TYPE_CHECKING:
    from thalweg import _C
    from thalweg.ps._arrivals import Arrivals


def leave(session: _C.Session, pid: int, arrivals: Arrivals) -> None:
    """Ends a session, in the process that has begun it: a forked child must not touch it."""
    if os.getpid() != pid:
        return
    is_over = session.status() is not None
    overtaken = arrivals.leave()
    session.close()
    if overtaken and not is_over:
        _logging.say(
            logging.WARNING,
            f"{some(overtaken)} has been changed while the weights of the last step were on their "
            "way, and stays without that step",
        )
