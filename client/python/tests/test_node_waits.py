"""Tests how long workers that reduce inside their node wait for each other, and what they are told:
as threads of this process with a controlled session.
"""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from node_of_threads import TIMEOUT, Node, bucket, gradient, node

from thalweg.node._sums import CollectiveError
from thalweg.node._waits import Waits, look_interval

OFTEN = 1.0  # a step's timeout with which a node looks often
FAILED = "job 'train': rank 7 on node3 is gone"


def submit(made: Node, ranks: list[int], index: int = 0) -> list[torch.futures.Future]:
    """Submits a bucket on the workers of these ranks."""
    return [
        made.members[rank].run_hook(bucket(index, gradient(index, rank)))  # type: ignore[arg-type]
        for rank in ranks
    ]


def told(future: torch.futures.Future) -> str:
    """Returns what a worker is told; empty for a result."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT), "nothing was told"
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return ""


class Looks:
    """Notes what a leader knows, and decides when its patience ends."""

    def __init__(self, made: Node, monkeypatch) -> None:
        self._waits = made.waits
        self._waits._tolerated = 100 * TIMEOUT
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._looks = 0
        note, late = made.waits.note, made.waits.late

        def note_too(rank, number, since):
            note(rank, number, since)
            with self._changed:
                self._waiting.add(rank)
                self._changed.notify_all()

        def count(number, now):
            with self._changed:
                self._looks += 1
                self._changed.notify_all()
            return late(number, now)

        monkeypatch.setattr(made.waits, "note", note_too)
        monkeypatch.setattr(made.waits, "late", count)

    def await_waits_of(self, ranks: set[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting == ranks, TIMEOUT)

    def end_patience(self) -> None:
        self._waits._tolerated = -1.0

    def pass_by(self, number: int) -> None:
        """Waits for so many more looks."""
        with self._changed:
            enough = self._looks + number
            assert self._changed.wait_for(lambda: self._looks >= enough, TIMEOUT)


def test_workers_are_late_after_nine_tenths_of_the_steps_timeout_as_at_a_sidecar():
    waits = Waits([4, 5, 6, 7], 10.0)
    assert waits.late(0, 1000.0) == ""  # nobody waits
    waits.note(6, 0, 100.0)
    waits.note(4, 0, 105.0)
    assert waits.late(0, 109.0) == ""
    assert waits.late(0, 109.1) == (
        "thalweg: rank 5, 7 did not hand over a gradient, for which rank 4, 6 of the same node "
        "waits, within 9 s; if that is a long but healthy pause, raise the timeout "
        "(THALWEG_STEP_TIMEOUT)"
    )
    waits.note(5, 0, 109.1)
    waits.note(7, 0, 109.1)
    assert waits.late(0, 1000.0) == ""  # all have come
    assert waits.late(1, 1000.0) == ""  # nobody has come to the next one


@pytest.mark.parametrize("timeout, step_timeout", [(30.0, 1800.0), (6.0, 8.0), (30.0, 0.5)])
def test_node_looks_often_enough_for_both_timeouts(timeout, step_timeout):
    interval = look_interval(timeout, step_timeout)
    assert interval <= timeout / 4
    # a report, and a look, before what the collectives tolerate
    assert 0.9 * step_timeout + 2 * interval <= step_timeout


@pytest.mark.parametrize("size", [2, 3])
def test_reason_of_a_failed_session_reaches_followers_before_their_leader_comes(size):
    with node(size) as made:
        futures = submit(made, list(range(1, size)))
        made.session.reason = FAILED
        futures += submit(made, [0]) if told(futures[0]) else []
        assert [told(future) for future in futures] == [f"thalweg: {FAILED}"] * size
        for member in made.members:
            assert member.status() == f"thalweg: {FAILED}"


@pytest.mark.parametrize(("came", "late"), [([1, 2], 0), ([0, 1], 2)], ids=["leader", "follower"])
def test_worker_that_does_not_come_is_named_to_all(came, late, monkeypatch):
    with node(3, step_timeout=OFTEN) as made:
        looks = Looks(made, monkeypatch)
        futures = submit(made, came)
        looks.await_waits_of(set(came))
        looks.end_patience()
        reasons = [told(future) for future in futures]
        reasons.append(told(submit(made, [late])[0]))
        others = ", ".join(map(str, came))
        named = f"rank {late} did not hand over a gradient, for which rank {others} of the"
        assert named in reasons[0]
        assert reasons == reasons[:1] * 3
        assert made.session.closed.wait(TIMEOUT)


def test_worker_that_came_is_not_late_however_long_the_session_takes(monkeypatch):
    with node(3, step_timeout=OFTEN) as made:
        looks = Looks(made, monkeypatch)
        futures = submit(made, [0, 1, 2])
        looks.await_waits_of({0, 1, 2})
        looks.end_patience()
        looks.pass_by(3)
        assert not any(future.done() for future in futures)
        made.hook.answer(0, torch.clone)
        assert [told(future) for future in futures] == [""] * 3


def test_time_before_the_last_result_does_not_count(monkeypatch):
    with node(2, step_timeout=OFTEN) as made:
        looks = Looks(made, monkeypatch)
        first, second = submit(made, [0, 1]), submit(made, [1], index=1)
        looks.await_waits_of({0, 1})
        sinces: queue.SimpleQueue[float] = queue.SimpleQueue()

        def note(rank, number, since):
            if number == 1:
                sinces.put(since)

        monkeypatch.setattr(made.waits, "note", note)
        made.hook.answer(0, torch.clone)
        assert [told(future) for future in first] == ["", ""]
        assert sinces.get(timeout=TIMEOUT) >= made.leader._progress
        second += submit(made, [0], index=1)
        made.hook.answer(1, torch.clone)
        assert [told(future) for future in second] == ["", ""]


def test_reason_of_the_session_counts_where_a_collective_fails(monkeypatch):
    with node(2) as made:

        def fail(_):
            made.session.reason = FAILED
            raise CollectiveError("thalweg: a collective failed")

        monkeypatch.setattr(made.leader._sums, "wait", fail)
        for future in submit(made, [0, 1]):
            assert told(future) == f"thalweg: {FAILED}"


@pytest.mark.parametrize("how", ["failed", "gone"])
def test_followers_tell_their_leaders_end_where_a_collective_fails_before_they_hear_of_it(
    how, monkeypatch
):
    with node(2) as made:
        [follower] = made.followers
        [line] = made.leader._followers.values()

        def fail(_):
            if how == "failed":
                line.send({"kind": "working"})
                line.send({"kind": "failed", "reason": f"thalweg: {FAILED}"})
            else:
                line.hang_up()
            raise CollectiveError("thalweg: a collective failed")

        monkeypatch.setattr(follower._sums, "wait", fail)
        futures = submit(made, [0, 1])
        made.hook.answer(0, torch.clone)
        expected = {
            "failed": f"thalweg: {FAILED}",
            "gone": "thalweg: rank 0, which speaks to the sidecar for this node, is gone",
        }
        assert told(futures[1]) == expected[how]
