"""Implements the worker of a node that submits the sum of its node's gradients to the sidecar."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket, Work

from thalweg import _C
from thalweg.node._sums import CollectiveError, NodeSums, Outcome
from thalweg.node._waits import Waits
from thalweg.node._words import SILENCES, Line, Words

CLOSED = "thalweg: the session was closed"
CAUSE_SECONDS = 1.0  # from a collective's error to another worker's last words: they tell the cause


@dataclass(eq=False)
class _Bucket:
    """A bucket in flight."""

    bucket: GradBucket
    outcome: Outcome
    work: Work  # the sum, later the broadcast
    # of the sum, then of the session, then of the broadcast
    step: torch.futures.Future[list[torch.Tensor]]
    since: float
    result: torch.Tensor | None = None


class Leader:
    """Completes on one thread what a hook starts; the thread waits only for events. Thread-safe.

    A failure is reported to the followers and ends the session, so that other nodes learn of it.
    """

    def __init__(
        self,
        session: _C.Session,
        hook: _C.DdpHook,
        sums: NodeSums,
        followers: Mapping[int, Line],
        *,
        waits: Waits,
        timeout: float,
        look_interval: float,
    ) -> None:
        """Starts the thread. `followers` are keyed by their rank in the job."""
        self._session = session
        self._hook = hook
        self._sums = sums
        self._followers = followers
        self._waits = waits
        self._timeout = timeout
        self._look_interval = look_interval
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held where a bucket begins, and where this member ends
        self._reason = ""  # why no further bucket is accepted
        self._leaver = ""  # why the next bucket will fail
        # Buckets pass through these queues in order: summed by the node, reduced by the sidecar,
        # broadcast. Only new buckets are added by other threads; the rest is done by this one.
        self._summing: collections.deque[_Bucket] = collections.deque()
        self._reducing: collections.deque[_Bucket] = collections.deque()
        self._spreading: collections.deque[_Bucket] = collections.deque()
        self._spread_so_far = 0
        self._progress = time.monotonic()  # the last result
        self._told = 0.0
        self._ended = False
        self._tell(
            {
                "kind": "welcome",
                "path": session.path(),
                "placement": session.placement(),
                "lost_nodes": session.lost_nodes(),
                "stats": session.stats(),
            }
        )
        self._threads = [threading.Thread(target=self._run, name="thw-leader", daemon=True)]
        self._threads += [
            threading.Thread(target=self._listen, args=follower, name="thw-listen", daemon=True)
            for follower in followers.items()
        ]
        for thread in self._threads:
            thread.start()

    def run_hook(self, bucket: GradBucket) -> Outcome:
        """Is the communication hook."""
        outcome = self._sums.make_outcome()
        with self._lock:
            self._reason = reason = self._reason or self._leaver
            if not reason:
                work = self._sums.sum(bucket.buffer())
                entry = _Bucket(bucket, outcome, work, work.get_future(), time.monotonic())
                self._summing.append(entry)
        if reason:
            _C.set_error(outcome, reason)
            self._events.put(lambda: self._fail(reason))
        else:
            entry.step.add_done_callback(self._wake)
        return outcome

    def stats(self) -> dict[str, float]:
        return self._session.stats()

    def path(self) -> str:
        return f"workers ({self._session.path()})"

    def placement(self) -> str:
        return self._session.placement()

    def lost_nodes(self) -> list[str]:
        return self._session.lost_nodes()

    def status(self) -> str | None:
        return self._reason or self._session.status()

    def close(self) -> None:
        """Leaves the job. Buckets in flight fail. May be called again."""
        self._events.put(lambda: self._end(CLOSED, {"kind": "left"}))
        if threading.current_thread() not in self._threads:
            self._threads[0].join(self._timeout)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._ended:
            try:
                self._events.get(timeout=self._look_interval)()
            except queue.Empty:
                pass
            except CollectiveError as error:
                self._fail_by(error)
            except Exception as error:  # noqa: BLE001 - whatever it is, all workers must hear of it
                self._fail(str(error))
            # Followers that wait for a result interpret silence as the leader's end. They may have
            # begun a step that this worker will come to much later.
            now = time.monotonic()
            if now - self._told >= self._timeout / SILENCES:
                self._tell({"kind": "working"})
            if now - looked >= self._look_interval:
                looked = now
                self._look(now)
        for listener in self._threads[1:]:
            listener.join()
        for line in self._followers.values():
            line.close()

    def _look(self, now: float) -> None:
        """Fails if the session has failed while nothing waits for it, or if a worker, perhaps this
        one, is late: no event tells either.
        """
        if self._ended or self._spreading:
            return
        # Buckets that are with the session tell of its failure themselves.
        reason = "" if self._reducing else self._why_session_failed()
        if waiting := self._reducing or self._summing:
            since = max(waiting[0].since, self._progress)
            self._waits.note(self._waits.leader, self._spread_so_far, since)
        if reason := reason or self._waits.late(self._spread_so_far, now):
            self._fail(reason)

    def _why_session_failed(self) -> str:
        status = self._session.status()
        return f"thalweg: {status}" if status else ""

    def _fail_by(self, error: CollectiveError) -> None:
        """Fails for the cause of a collective's error: a listener may still have to tell it."""
        deadline = time.monotonic() + min(CAUSE_SECONDS, self._timeout / SILENCES)
        while not self._ended and not self._leaver:
            try:
                self._events.get(timeout=max(deadline - time.monotonic(), 0))()
            except queue.Empty:
                break
            except CollectiveError:  # of another bucket, or of this one again
                pass
            except Exception as cause:  # noqa: BLE001 - as above
                self._fail(str(cause))
        if not self._ended:
            self._fail(self._leaver or self._why_session_failed() or str(error))

    def _wake(self, _: object) -> None:
        self._events.put(self._advance)

    def _advance(self) -> None:
        """Moves each bucket, in order, to the next queue when the step it waits for is done."""
        for waiting, act, following in (
            (self._summing, self._submit, self._reducing),
            (self._reducing, self._spread, self._spreading),
            (self._spreading, self._complete, None),
        ):
            while waiting and waiting[0].step.done():
                act(waiting[0])
                entry = waiting.popleft()
                if following is not None:
                    following.append(entry)
                    entry.step.add_done_callback(self._wake)

    def _submit(self, entry: _Bucket) -> None:
        with self._sums.on_the_way("up"):
            self._sums.wait(entry.work)
            entry.step = self._hook.run(entry.bucket)

    def _spread(self, entry: _Bucket) -> None:
        with self._sums.on_the_way("down"):
            [entry.result] = entry.step.wait()
            words: Words = {"kind": "result"}
            if entry.bucket.is_last():
                words["stats"] = self._session.stats()
                words["lost_nodes"] = self._session.lost_nodes()
            self._tell(words)
            entry.work = self._sums.spread(entry.result)
            self._spread_so_far += 1
            self._progress = time.monotonic()
        entry.step = entry.work.get_future()

    def _complete(self, entry: _Bucket) -> None:
        assert entry.result is not None
        with self._sums.on_the_way("down"):
            self._sums.wait(entry.work)
            entry.outcome.set_result(entry.result)

    def _tell(self, words: Words) -> None:
        self._told = time.monotonic()
        for line in self._followers.values():
            with contextlib.suppress(OSError):  # the listener of its connection reports its end
                line.send(words)

    def _listen(self, rank: int, line: Line) -> None:
        """Waits for a follower's last message, that it leaves, after how many results, or that it
        has failed; until then it may say for which bucket it waits, and for how long.
        """
        try:
            while (words := line.receive()) is not None and words["kind"] == "waiting":
                since = time.monotonic() - words["waited"]
                self._events.put(functools.partial(self._waits.note, rank, words["bucket"], since))
        except OSError:
            self._events.put(lambda: self._fail(f"thalweg: rank {rank} is gone"))
            return
        if words is not None and words["kind"] == "failed":
            reason = words["reason"]
            self._events.put(lambda: self._fail(reason))
        else:
            taken = 0 if words is None else words.get("taken", 0)
            self._events.put(lambda: self._lose(f"thalweg: rank {rank} has left the job", taken))

    def _lose(self, reason: str, taken: int) -> None:
        """Handles a follower that has left after it took in the first `taken` results."""
        self._leaver = reason
        # It may have its last result before this worker knows that its own broadcast is over.
        has_all = taken == self._spread_so_far
        if self._summing or self._reducing or (self._spreading and not has_all):
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._end(reason, {"kind": "failed", "reason": reason})

    def _end(self, reason: str, last_words: Words) -> None:
        self._ended = True
        self._tell(last_words)
        with self._lock:
            self._reason = self._reason or reason
        on_its_way = [*self._summing, *self._reducing, *self._spreading]
        for entry in on_its_way:
            _C.set_error(entry.outcome, self._reason)
        self._session.close()
        for line in self._followers.values():
            line.hang_up()
        self._sums.end(orderly=last_words["kind"] == "left" and not on_its_way)
