"""Tests that failures reach all workers, which are threads of one process."""

from types import SimpleNamespace

import pytest
from job_of_threads import Workers

from thalweg import _collectives


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
