"""Implements a worker whose node's leader submits its gradients, summed with its own, to the
sidecar.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket, Work

from thalweg import _C
from thalweg.node._leader import CAUSE_SECONDS, CLOSED
from thalweg.node._sums import CollectiveError, NodeSums, Outcome
from thalweg.node._words import SILENCES, Line, Words


@dataclass(eq=False)
class _Bucket:
    """A bucket whose result is pending."""

    buffer: torch.Tensor
    outcome: Outcome
    work: Work
    since: float


class Follower:
    """Receives results on one thread, in the leader's order. Thread-safe."""

    def __init__(
        self, line: Line, sums: NodeSums, leader: int, timeout: float, look_interval: float
    ) -> None:
        """Starts the thread. `leader` is the leader's rank in the job. Raises RuntimeError."""
        self._line = line
        self._sums = sums
        self._leader = f"thalweg: rank {leader}, which speaks to the sidecar for this node,"
        self._timeout = timeout
        self._look_interval = look_interval
        try:
            welcome = line.receive(timeout)
        except OSError as error:
            raise RuntimeError(f"{self._leader} is gone") from error
        if welcome is None:
            raise RuntimeError(f"{self._leader} has sent nothing for {timeout:g} s")
        self._path: str = welcome["path"]
        self._placement: str = welcome["placement"]
        self._stats: dict[str, float] = welcome["stats"]
        self._lost_nodes: list[str] = welcome["lost_nodes"]
        # The lock is reentrant: a garbage collection may call close() anywhere on any thread.
        self._lock = threading.RLock()
        # _lock guards all members below.
        self._reason = ""  # why no further bucket is accepted
        self._leaver = ""  # why the next bucket will fail
        self._orderly = True  # nothing was in flight at the end
        self._waiting: collections.deque[_Bucket] = collections.deque()
        self._heard = time.monotonic()
        # used by the thread only
        self._taken = 0  # results so far
        self._progress = self._heard  # the last result
        self._reported = -1  # the last bucket for which the leader knows that this worker waits
        self._thread = threading.Thread(target=self._run, name="thw-follower", daemon=True)
        self._thread.start()

    def run_hook(self, bucket: GradBucket) -> Outcome:
        """Is the communication hook."""
        outcome = self._sums.make_outcome()
        buffer = bucket.buffer()
        with self._lock:
            self._reason = reason = self._reason or self._leaver
            if not reason:
                work = self._sums.sum(buffer)
                self._waiting.append(_Bucket(buffer, outcome, work, time.monotonic()))
        if reason:
            _C.set_error(outcome, reason)
        return outcome

    def stats(self) -> dict[str, float]:
        """Returns the leader's statistics, as of the last backward pass: they hold for this worker
        too.
        """
        return dict(self._stats)

    def path(self) -> str:
        return f"workers ({self._path})"

    def placement(self) -> str:
        return self._placement

    def lost_nodes(self) -> list[str]:
        return self._lost_nodes

    def status(self) -> str | None:
        return self._reason or None

    def close(self) -> None:
        """Leaves the job. Buckets in flight fail. May be called again."""
        self._fail(CLOSED)
        self._line.stop_listening()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout)

    def _run(self) -> None:
        try:
            try:
                while self._follow(self._hear()):
                    pass
            except CollectiveError as error:
                self._fail(self._cause() or str(error))
        except OSError:
            self._fail(f"{self._leader} is gone")
        except Exception as error:  # noqa: BLE001 - whatever it is, backward() must hear of it
            self._fail(str(error))
        kind = "left" if self._reason in ("", CLOSED) else "failed"
        with contextlib.suppress(OSError):  # if the leader has already ended
            self._line.send({"kind": kind, "reason": self._reason, "taken": self._taken})
        self._line.hang_up()
        self._line.close()
        self._sums.end(self._orderly)

    def _cause(self) -> str:
        """Returns the cause of a collective's error, if it is in the leader's last words. Raises
        OSError when the leader is gone.
        """
        deadline = time.monotonic() + min(CAUSE_SECONDS, self._timeout / SILENCES)
        while words := self._line.receive(max(deadline - time.monotonic(), 0)):
            if words["kind"] == "failed":
                return str(words["reason"])
        return ""

    def _hear(self) -> Words:
        """Returns the leader's next message; the leader is never silent for long while a result is
        pending.
        """
        while True:
            words = self._line.receive(self._look_interval)
            now = time.monotonic()
            with self._lock:
                if words is not None:
                    self._heard = now
                begun = self._waiting[0].since if self._waiting else None
            if begun is not None and (words is None or words["kind"] == "working"):
                self._report(now - max(begun, self._progress))
            if words is not None:
                return words
            since = now if begun is None else max(self._heard, begun)
            if now - since > self._timeout:
                raise RuntimeError(f"{self._leader} has sent nothing for {self._timeout:g} s")

    def _report(self, waited: float) -> None:
        """Tells the leader, once for each bucket, that this worker waits for the bucket's result:
        the leader decides who is late.
        """
        if self._reported != self._taken:
            self._reported = self._taken
            with contextlib.suppress(OSError):  # the leader's last words are still to be heard
                self._line.send({"kind": "waiting", "bucket": self._taken, "waited": waited})

    def _follow(self, words: Words) -> bool:
        """Handles a message; returns False if it is the leader's last."""
        if words["kind"] == "result":
            self._take_in(words)
        elif words["kind"] == "failed":
            self._fail(words["reason"])
            return False
        elif words["kind"] == "left":
            with self._lock:
                self._leaver = f"{self._leader} has left the job"
                waited_for = bool(self._waiting)
            if waited_for:
                self._fail(self._leaver)
            return False
        return True

    def _take_in(self, words: Words) -> None:
        with self._lock:
            if not self._waiting:  # closed in the meantime
                return
            self._stats = words.get("stats", self._stats)
            self._lost_nodes = words.get("lost_nodes", self._lost_nodes)
            bucket = self._waiting.popleft()
        try:
            with self._sums.on_the_way("down"):
                # the gradient must be read before the result is written
                self._sums.wait(bucket.work)
                self._sums.wait(self._sums.spread(bucket.buffer))
                self._taken += 1
                self._progress = time.monotonic()
                bucket.outcome.set_result(bucket.buffer)
        except RuntimeError:
            with self._lock:
                self._waiting.appendleft(bucket)  # _fail() completes it
            raise

    def _fail(self, reason: str) -> None:
        with self._lock:
            if not self._reason:
                self._reason = reason
                self._orderly = reason == CLOSED and not self._waiting
            failed = list(self._waiting)
            self._waiting.clear()
        for bucket in failed:
            _C.set_error(bucket.outcome, self._reason)
