"""Tests how workers meet through a store, in one process."""

import threading

import pytest
import torch.distributed as dist

from thalweg import _rendezvous


def test_all_that_come_go_on():
    store, problems = dist.HashStore(), []

    def come(rank):
        try:
            _rendezvous.meet(store, "k", rank=rank, world=3, timeout=30)
        except TimeoutError as error:
            problems.append(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert problems == []


def test_missing_ranks_are_named_with_the_timeout():
    store = dist.HashStore()
    store.set("k/2", "1")
    text = r"rank 1, 3 has not come to attach\(\) within 0.1 s \(THALWEG_TIMEOUT\)"
    with pytest.raises(TimeoutError, match=text):
        _rendezvous.meet(store, "k", rank=0, world=4, timeout=0.1)


def test_rank_that_comes_when_others_have_given_up_is_told_at_once():
    store = dist.HashStore()
    with pytest.raises(TimeoutError):
        _rendezvous.meet(store, "k", rank=0, world=2, timeout=0.1)
    with pytest.raises(TimeoutError, match=r"rank 1 has come to attach\(\) when others"):
        _rendezvous.meet(store, "k", rank=1, world=2, timeout=3600)


def test_each_meeting_of_a_group_has_a_key_of_its_own():
    class Group:
        group_name = "a group of this test"

    first, second = (_rendezvous.next_key("attach", Group()) for _ in range(2))
    assert first != second
    assert _rendezvous.next_key("module", Group()) not in {first, second}
