"""Leaves a job when what is on its way has come: other nodes wait for this one's part in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.futures import Future

if TYPE_CHECKING:
    from thalweg import _C


class Flight:
    """What a bucket's last push gives, as long as nobody has taken it."""

    coming: Future[Tensor] | None = None


def leave(session: _C.Session, pid: int, flights: Sequence[Flight]) -> None:
    """Ends a session, in the process that has begun it: a forked child must not touch it."""
    if os.getpid() != pid:
        return
    for flight in flights:
        if flight.coming is not None:
            with contextlib.suppress(RuntimeError):
                flight.coming.wait()
    session.close()
