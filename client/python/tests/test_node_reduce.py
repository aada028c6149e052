"""Tests workers that reduce inside their node, as threads of this process with a controlled
session. Real jobs are in tests/e2e/test_node_jobs.py.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from node_of_threads import ELEMS, TIMEOUT, bucket, gradient, make_sums, node

from thalweg.node import _follower, _leader
from thalweg.node._words import SILENCES, Line

SIZES = [2, 3]


def mean(index: int, size: int) -> torch.Tensor:
    """Returns the mean in float64."""
    return torch.stack([gradient(index, rank).double() for rank in range(size)]).mean(0)


def outcomes_of(futures) -> list[str]:
    """Returns what each worker is told; empty for a result."""
    told = []
    for future in futures:
        try:
            future.wait()
        except RuntimeError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_each_bucket_gets_its_own_result_whatever_order_they_come_in(size, order):
    with node(size) as made:
        futures = [made.backward(index) for index in range(4)]
        for index in order:
            made.hook.answer(index, lambda mean_of_node, add=10 * index: mean_of_node + add)
        for index in range(4):
            results = [future.wait() for future in futures[index]]
            assert all(torch.equal(result, results[0]) for result in results)
            # A division and size - 1 additions each round by 2^-24 of at most 6 (the largest of
            # 1000 normal values), the addition of up to 30 by 2^-24 of 36.
            error = (results[0].double() - mean(index, size) - 10 * index).abs().max()
            assert error <= 2.0**-24 * (6 * size + 36)
        assert made.hook.order == [0, 1, 2, 3]


def test_nodes_with_fewer_workers_count_as_much_as_their_workers():
    # With two nodes and three workers, the mean over nodes of (sum of a node's gradients / 1.5) is
    # the mean over workers. 1.5 and these values are exact in float32.
    sums = make_sums(2, nodes=2, world=3)
    gradients = [torch.tensor([3.0, 6.0]), torch.tensor([9.0, -3.0])]
    works = [one.sum(mine) for one, mine in zip(sums, gradients, strict=True)]
    for work in works:
        work.wait()
    other_node = torch.tensor([4.5, 1.5]) / 1.5
    assert torch.equal((gradients[0] + other_node) / 2, torch.tensor([5.5, 1.5]))


def test_half_precision_does_not_overflow_where_its_mean_does_not():
    sums = make_sums(2)
    gradients = [torch.full((ELEMS,), 60000.0, dtype=torch.float16) for _ in sums]
    works = [one.sum(mine) for one, mine in zip(sums, gradients, strict=True)]
    for work in works:
        work.wait()
    assert torch.equal(gradients[0], torch.full((ELEMS,), 60000.0, dtype=torch.float16))


def test_sparse_gradient_is_refused():
    with pytest.raises(RuntimeError, match="sparse, which is not supported: use dense gradients"):
        make_sums(1)[0].sum(torch.eye(3).to_sparse())


@pytest.mark.parametrize("size", SIZES)
def test_failed_session_is_told_to_all_workers_and_for_good(size):
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("thalweg: rank 7 on node3 is gone")

    with node(size) as made:
        futures = [made.backward(index) for index in range(3)]
        made.hook.answer(0, torch.clone)
        assert outcomes_of(futures[0]) == [""] * size
        made.hook.answer(1, fail)
        for told in outcomes_of(futures[1]) + outcomes_of(futures[2]):
            assert "thalweg: rank 7 on node3 is gone" in told
        assert made.session.closed.wait(TIMEOUT)
        for told in outcomes_of(made.backward(3)):
            assert "thalweg: rank 7 on node3 is gone" in told
        for member in made.members:
            assert "rank 7 on node3" in member.status()


def test_follower_that_dies_fails_the_node_and_ends_the_session():
    with node(3) as made:
        futures = made.backward(0)
        made.lines[1].hang_up()  # without a message
        told = outcomes_of(futures)
        assert "rank 2 is gone" in told[0]
        assert "rank 2 is gone" in told[1]
        assert made.session.closed.wait(TIMEOUT)


def test_leader_that_dies_is_named_by_its_followers(monkeypatch):
    with node(3) as made:
        monkeypatch.setattr(made.leader, "_tell", lambda words: None)
        for line in made.leader._followers.values():
            line.hang_up()
        for told in outcomes_of(made.backward(0)[1:]):
            assert "rank 0, which speaks to the sidecar for this node, is gone" in told


def test_collective_that_fails_fails_the_node_and_names_its_workers():
    with node(2) as made:
        # Only the timeout tells the leader; the two must connect before, for as long as it takes.
        made.leader._sums._sums.set_timeout(timedelta(seconds=1))
        futures = [made.leader.run_hook(bucket(0, gradient(0, 0)))]
        made.followers[0]._sums._sums.abort()
        [told] = outcomes_of(futures)
        assert "thalweg: a collective of rank 0, 1, a node's workers, failed: " in told


@pytest.mark.parametrize("how", ["has left the job", "is gone"])
def test_follower_that_ends_is_named_where_a_collective_fails_before_it_is_heard(how, monkeypatch):
    monkeypatch.setattr(_leader, "CAUSE_SECONDS", TIMEOUT)
    failed = threading.Event()
    with node(2) as made:
        [follower] = made.followers
        wait, end, send = made.leader._sums.wait, follower._sums.end, follower._line.send

        def note(work):
            try:
                wait(work)
            except RuntimeError:
                failed.set()
                raise

        def end_first(words):
            end(False)  # which ends the leader's collective
            assert failed.wait(TIMEOUT)
            if how == "has left the job":
                send(words)

        monkeypatch.setattr(made.leader._sums, "wait", note)
        monkeypatch.setattr(follower._line, "send", end_first)
        monkeypatch.setattr(follower._sums, "end", lambda orderly: None)
        futures = [made.leader.run_hook(bucket(0, gradient(0, 0)))]
        follower.close()
        assert outcomes_of(futures) == [f"thalweg: rank 1 {how}"]


@pytest.mark.parametrize("leaver", [0, 1])
def test_worker_that_leaves_fails_the_others_only_when_they_go_on(leaver):
    with node(2) as made:
        futures = made.backward(0)
        made.hook.answer(0, torch.clone)
        assert outcomes_of(futures) == ["", ""]
        made.members[leaver].close()
        stays = made.members[1 - leaver]
        assert stays.status() is None
        told = outcomes_of(made.backward(1))
        assert told[leaver] == "thalweg: the session was closed"
        assert f"rank {leaver}" in told[1 - leaver]
        assert "has left the job" in told[1 - leaver]


def test_follower_may_leave_before_its_leader_knows_that_the_broadcast_is_over(monkeypatch):
    with node(2) as made:
        over: torch.futures.Future = torch.futures.Future()
        heard = threading.Event()
        spread, lose = made.leader._sums.spread, made.leader._lose

        def spread_and_hear_late(result):
            return SimpleNamespace(wait=spread(result).wait, get_future=lambda: over)

        def note_and_lose(*arguments):
            lose(*arguments)
            heard.set()

        monkeypatch.setattr(made.leader._sums, "spread", spread_and_hear_late)
        monkeypatch.setattr(made.leader, "_lose", note_and_lose)
        ours, theirs = made.backward(0)
        made.hook.answer(0, torch.clone)
        assert outcomes_of([theirs]) == [""]
        made.followers[0].close()
        assert heard.wait(TIMEOUT)
        assert not ours.done()
        over.set_result(None)
        assert outcomes_of([ours]) == [""]
        [told] = outcomes_of([made.leader.run_hook(bucket(1, gradient(1, 0)))])
        assert "rank 1 has left the job" in told


@pytest.mark.parametrize("closer", [0, 1])
def test_closing_fails_what_is_on_its_way(closer):
    with node(2) as made:
        futures = made.backward(0)
        made.members[closer].close()
        told = outcomes_of(futures)
        assert told[closer] == "thalweg: the session was closed"
        assert f"rank {closer}" in told[1 - closer]


@pytest.mark.parametrize("fails", [False, True])
def test_end_closes_the_sockets_of_all_workers(fails):
    with node(3) as made:
        lines = [*made.lines, *made.leader._followers.values()]
        if fails:
            made.lines[1].hang_up()
    assert [line._connection.fileno() for line in lines] == [-1] * 4


def test_result_that_takes_longer_than_the_timeout_is_waited_for(monkeypatch):
    heard, enough = [], threading.Event()
    receive = Line.receive

    def count(self, seconds=None):
        words = receive(self, seconds)
        if words is not None and words["kind"] == "working":
            heard.append(words)
            if len(heard) > 2 * SILENCES:  # two timeouts have passed
                enough.set()
        return words

    def receive_or_not(self, seconds=None):
        """Looks twice as often as the leader speaks: a follower also hears nothing for a while."""
        return count(self, None if seconds is None else seconds / 2)

    monkeypatch.setattr(Line, "receive", receive_or_not)
    # Time passes by what the leader says: one that is held up has not been silent for long.
    clock = SimpleNamespace(monotonic=lambda: len(heard) / SILENCES)
    monkeypatch.setattr(_follower, "time", clock)
    with node(2, timeout=1.0) as made:
        futures = made.backward(0)
        assert enough.wait(TIMEOUT)
        made.hook.answer(0, torch.clone)
        assert outcomes_of(futures) == ["", ""]


def test_silent_leader_is_not_waited_for_longer_than_the_timeout(monkeypatch):
    with node(2, timeout=0.5) as made:
        monkeypatch.setattr(made.leader, "_tell", lambda words: None)
        for told in outcomes_of(made.backward(0)):  # the leader learns of it
            assert "rank 0, which speaks to the sidecar" in told
            assert "has sent nothing for 0.5 s" in told


def test_followers_have_the_leaders_path_and_its_statistics_of_the_last_backward_pass():
    with node(2) as made:
        assert [member.stats() for member in made.members] == [{"rounds": 0}] * 2
        for index in range(3):
            futures = made.backward(index, last=index == 2)
            made.hook.answer(index, torch.clone)
            assert outcomes_of(futures) == ["", ""]
        assert [member.stats() for member in made.members] == [{"rounds": 3}] * 2
        assert [member.path() for member in made.members] == ["workers (cpu)"] * 2
        assert [member.placement() for member in made.members] == ["2 shards sum equal shares"] * 2
