"""Lets a job whose shards have lost weights go back to a snapshot."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from thalweg import _C
from thalweg._job import _collectives
from thalweg._job._collectives import Meeting
from thalweg.ps._joining import Joined
from thalweg.ps._serving import Serving
from thalweg.ps._snapshots import Snapshots, restore

_PAUSE = 0.2  # seconds between two attempts, while shards are being started again


class RolledBack(Exception):
    """The shards had lost weights. All workers have those of an earlier step again, and may go on
    from there; `step` is the number of updates that are left (ServerOptimizer.updates).
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"thalweg: shards had lost their weights: all workers have those after {step} updates "
            "again, and the script has to go back as well (docs/parameter-server.md)"
        )
        self.step = step


def roll_back(
    serving: Serving,
    snapshots: Snapshots,
    rejoin: Callable[[], Joined],
    meeting: Meeting,
    why: str,
) -> int:
    """Makes the workers a new job, which goes on from the latest snapshot that all shards have, of
    a step that has ended on all workers. All workers call it, and all raise, or return how many
    updates that is after. Shards may be away for the meeting's timeout.
    """
    serving.close()
    deadline = time.monotonic() + meeting.timeout
    while True:
        snapshots.branch += 1
        try:
            step = _try(serving, snapshots, rejoin, meeting)
        except (RuntimeError, OSError) as error:
            serving.close(gives_up=True)
            if not _collectives.gather(time.monotonic() < deadline, meeting)[0]:
                raise RuntimeError(
                    f"{why}; and the job could not go back to a snapshot: {error}"
                ) from error
            time.sleep(_PAUSE)
            continue
        if step is None:
            serving.close(gives_up=True)
            raise RuntimeError(f"{why}; and there is no snapshot yet that all shards have")
        snapshots.go_on_from(step)
        return step


def _try(
    serving: Serving, snapshots: Snapshots, rejoin: Callable[[], Joined], meeting: Meeting
) -> int | None:
    """Returns None where there is no snapshot."""
    session = rejoin().session
    connect = functools.partial(_connect, serving, session)
    seen = min(_collectives.gather_made(connect, meeting))
    step = _restored(functools.partial(restore, session, seen, meeting.timeout), meeting)
    if step is not None:
        _collectives.gather_made(functools.partial(serving.fetch, step), meeting)
    return step


def _restored(restore_latest: Callable[[], int | None], meeting: Meeting) -> int | None:
    """Returns what the first worker's call returns, which takes as long as shards read their files:
    the others hear from time to time that it goes on.
    """
    call: Future[int | None] | None = None
    if meeting.rank == 0:
        call = Future()
        # A process that ends meanwhile does not wait for it.
        threading.Thread(target=_call, args=(restore_latest, call), daemon=True).start()
    is_over = False
    while not is_over:
        if call is not None:
            wait([call], meeting.timeout / 2)
        is_over = all(_collectives.gather(call is None or call.done(), meeting))
    return _collectives.gather_made(_nothing if call is None else call.result, meeting)[0]


def _call(function: Callable[[], int | None], call: Future[int | None]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:  # noqa: BLE001 - whoever waits raises it
        call.set_exception(error)


def _connect(serving: Serving, session: _C.Session) -> int:
    serving.reconnect(session)
    return serving.updates


def _nothing() -> int | None:
    return None
