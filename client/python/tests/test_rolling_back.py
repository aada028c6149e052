"""Tests how workers wait for shards that restore a snapshot."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from thalweg._job import _collectives
from thalweg._job._collectives import Meeting
from thalweg.ps import _rolling_back

TIMEOUT = 0.25  # others wait for a worker for twice as long


def restored(restore_latest):
    """Returns what two workers return, or raise, of which the first restores."""
    store = dist.HashStore()

    def work(rank):
        meeting = Meeting(None, "back", rank, 2, TIMEOUT, store)
        try:
            return _rolling_back._restored(restore_latest, meeting)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_others_wait_for_as_long_as_the_first_worker_restores(monkeypatch):
    gathered = threading.Semaphore(0)

    def counted(*arguments, gather=_collectives.gather):
        try:
            return gather(*arguments)
        finally:
            gathered.release()

    def long():
        for _ in range(2 * 6):  # which takes longer than they wait for each other
            assert gathered.acquire(timeout=60)
        return 7

    monkeypatch.setattr(_collectives, "gather", counted)
    assert restored(long) == [7, 7]


def test_why_nothing_could_be_restored_is_raised_on_all_workers():
    def fail():
        raise RuntimeError("the disk is gone")

    for error in restored(fail):
        assert "the disk is gone" in error
