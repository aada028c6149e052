"""Tests that failures reach all workers, which are threads of one process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from gloo_workers import run_workers
from job_of_threads import TIMEOUT, Workers

from thalweg._job import _collectives, _rendezvous
from thalweg._job._collectives import Meeting


@pytest.fixture
def workers(monkeypatch):
    return Workers(3, monkeypatch)


def failing_on(failed, make):
    def work(rank):
        if rank == failed:
            raise ConnectionError("thalweg: no sidecar")
        return make(rank)

    return work


def told(error):
    return type(error), str(error)


EVERYBODY_IS_TOLD = [
    (RuntimeError, "thalweg: rank 1: no sidecar"),
    (ConnectionError, "thalweg: no sidecar"),
    (RuntimeError, "thalweg: rank 1: no sidecar"),
]


def test_values_are_gathered_where_all_make_one(workers):
    results = workers.run(lambda rank: _collectives.gather_made(lambda: rank * 10, None))
    assert results == [[0, 10, 20]] * 3


def test_failure_to_make_a_value_is_told_to_all(workers):
    make = failing_on(1, lambda rank: rank)
    results = workers.run(lambda rank: _collectives.gather_made(lambda: make(rank), None))
    assert [told(error) for error in results] == EVERYBODY_IS_TOLD


def test_failure_without_words_is_told_to_all(workers):
    def make(rank):
        if rank == 2:
            raise KeyError
        return rank

    results = workers.run(lambda rank: _collectives.gather_made(lambda: make(rank), None))
    assert [str(error) for error in results[:2]] == ["thalweg: rank 2: KeyError"] * 2


def test_cause_is_told_also_to_those_that_have_waited_in_vain(workers):
    def make(rank):
        if rank == 2:
            raise ConnectionError("thalweg: no route")
        raise TimeoutError("thalweg: node 2 did not join")

    results = workers.run(lambda rank: _collectives.gather_made(lambda: make(rank), None))
    waited = (RuntimeError, "thalweg: rank 2: no route")
    assert [told(error) for error in results] == [
        waited,
        waited,
        (ConnectionError, "thalweg: no route"),
    ]


def test_workers_that_have_all_waited_in_vain_say_so(workers):
    def make(rank):
        raise TimeoutError(f"thalweg: {rank} waited")

    results = workers.run(lambda rank: _collectives.gather_made(lambda: make(rank), None))
    assert [told(error) for error in results] == [
        (TimeoutError, f"thalweg: {rank} waited") for rank in range(3)
    ]


def test_what_others_made_is_closed_when_one_fails(workers):
    closed = []
    make = failing_on(1, lambda rank: SimpleNamespace(close=lambda: closed.append(rank)))
    results = workers.run(lambda rank: _collectives.together(lambda: make(rank), None))
    assert [told(error) for error in results] == EVERYBODY_IS_TOLD
    assert sorted(closed) == [0, 2]


def test_what_all_made_stays_open(workers):
    made = SimpleNamespace(close=lambda: pytest.fail("it was closed"))
    assert workers.run(lambda _: _collectives.together(lambda: made, None)) == [made] * 3
    assert workers.run(lambda _: _collectives.together(lambda: None, None)) == [None] * 3


@pytest.fixture
def store(monkeypatch):
    """Lets workers that are threads meet as processes do."""
    store = dist.HashStore()
    monkeypatch.setattr(_rendezvous, "default_store", lambda: store)


def each_of(ranks, work, *, world=3, timeout=TIMEOUT):
    """Returns what `work` returns or raises on the ranks that come."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        meetings = [Meeting(None, "group", rank, world, timeout) for rank in ranks]
        working = [pool.submit(work, meeting) for meeting in meetings]
    return [one.exception() or one.result() for one in working]


def test_values_of_any_kind_are_gathered_again_and_again(store):
    def work(meeting):
        return [_collectives.gather((meeting.rank, {"of": number}), meeting) for number in (1, 2)]

    gathered = [[(rank, {"of": number}) for rank in range(3)] for number in (1, 2)]
    assert each_of([0, 1, 2], work) == [gathered] * 3


# Rank 0 names all that have not come, also if they are only late.
@pytest.mark.parametrize(("absent", "timeout"), [(0, 0.1), (1, 2.5)])
def test_worker_that_hangs_is_named_to_the_others_within_the_timeout(store, absent, timeout):
    ranks = [rank for rank in range(3) if rank != absent]
    errors = each_of(ranks, lambda meeting: _collectives.gather(1, meeting), timeout=timeout)
    within = f"within {2 * timeout:g} s"
    text = f"thalweg: rank {absent} has not come to the others inside attach() {within}"
    assert [type(error) for error in errors] == [TimeoutError] * 2
    assert all(str(error).startswith(text) for error in errors)


def test_own_failure_is_raised_where_another_worker_hangs(store):
    def make():
        raise ConnectionError("thalweg: no sidecar")

    for work in (_collectives.gather_made, _collectives.together):
        [error, _] = each_of([1, 2], lambda meeting, w=work: w(make, meeting), timeout=0.1)
        assert told(error) == (ConnectionError, "thalweg: no sidecar")


def test_what_was_made_is_closed_where_another_worker_hangs(store):
    closed = []
    made = SimpleNamespace(close=lambda: closed.append(True))
    [error] = each_of(
        [0], lambda meeting: _collectives.together(lambda: made, meeting), timeout=0.1
    )
    assert isinstance(error, TimeoutError)
    assert closed == [True]


def test_attach_names_a_worker_that_hangs_within_it(tmp_path):
    env = {"THALWEG_TIMEOUT": "5"}
    first, _ = run_workers("hanging_worker.py", 2, Path(tmp_path), timeout=90, **env)
    assert first == "TimeoutError: thalweg: rank 1 has not come to the others inside attach() " + (
        "within 10 s (THALWEG_TIMEOUT)"
    )
