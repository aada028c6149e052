"""Tests how workers meet through a store; they are threads of one process."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist

from thalweg._job import _rendezvous

TIMEOUT = 30.0  # for waits that should never time out
SHORT = 0.2
# Ranks that come do so within this time, even where others have the machine for a while.
SECONDS = 5.0


@pytest.fixture(params=["hash", "tcp"])
def connect(request):
    """Returns a function that connects to one store, as every worker does."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def client():
        return dist.PrefixStore("default", dist.TCPStore("localhost", server.port, is_master=False))

    return client


def come(connect, pool, rank, value="", *, world, timeout=TIMEOUT) -> Future:
    def gather():
        return _rendezvous.gather(
            connect(), "k", value, where="attach()", rank=rank, world=world, timeout=timeout
        )

    return pool.submit(gather)


def meet(connect, values, *, world=0, timeout=TIMEOUT):
    """Lets the ranks of `values` meet; returns what each learns, or its TimeoutError."""
    with ThreadPoolExecutor(len(values)) as pool:
        world = world or len(values)
        all_ = [
            come(connect, pool, rank, value, world=world, timeout=timeout)
            for rank, value in values.items()
        ]
    return [one.exception() or one.result() for one in all_]


def test_all_that_come_learn_what_all_give(connect):
    assert meet(connect, {0: "a", 2: "", 1: "c"}) == [["a", "c", ""]] * 3


def test_64_that_come_at_once_learn_what_all_give():
    store = dist.HashStore()  # a TCPStore asks DNS for each connection
    values = {rank: str(rank) for rank in range(64)}
    assert meet(lambda: store, values) == [list(values.values())] * 64


def test_missing_ranks_are_named_to_all_that_came(connect):
    errors = meet(connect, {0: "a", 2: "c"}, world=4, timeout=SECONDS)
    text = "thalweg: rank 1, 3 has not come to attach() within 5 s (THALWEG_TIMEOUT)"
    assert [str(error) for error in errors] == [text] * 2
    assert isinstance(errors[0], TimeoutError)


def test_rank_0_says_once_whom_it_waits_for_before_it_gives_up(connect, caplog):
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(
            _rendezvous.gather,
            *(connect(), "k", ""),
            where="attach()",
            rank=0,
            world=3,
            timeout=3 * SHORT,
            quiet=SHORT,
        )
    assert isinstance(alone.exception(), TimeoutError)
    text = "thalweg: waiting for rank 1, 2 to come to attach(), for 0.6 s at most (THALWEG_TIMEOUT)"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.parametrize(("local_rank", "times"), [("0", 1), ("1", 0)])
def test_first_worker_of_a_node_says_once_that_it_waits_for_rank_0(
    connect, caplog, monkeypatch, local_rank, times
):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(TimeoutError):
        _rendezvous.gather(
            *(connect(), "k", ""),
            where="attach()",
            rank=1,
            world=3,
            timeout=2 * SHORT,
            quiet=SHORT,
        )
    text = "thalweg: waiting for rank 0 to come to attach(), for 0.4 s at most (THALWEG_TIMEOUT)"
    assert [record.getMessage() for record in caplog.records] == [text] * times


def test_rank_0_is_named_when_nobody_answers(connect):
    [error] = meet(connect, {1: "b"}, world=3, timeout=SHORT)
    assert isinstance(error, TimeoutError)
    assert "rank 0 has not come to attach()" in str(error)


def test_second_meeting_gives_new_answers(connect):
    assert meet(connect, {0: "a", 1: "b"}) == [["a", "b"]] * 2
    assert meet(connect, {0: "c", 1: "d"}) == [["c", "d"]] * 2


def test_rank_0_whose_process_may_serve_the_store_stays_until_the_others_have_read():
    store, stayed = dist.HashStore(), []

    class SlowReader:
        """Reads what has been decided when rank 0 has had the time to leave."""

        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, key):
            if key.endswith("/all"):
                wait([first], SHORT)
                stayed.append(not first.done())
            return store.get(key)

    with ThreadPoolExecutor(2) as pool:
        first = come(lambda: store, pool, 0, "a", world=2)
        second = come(SlowReader, pool, 1, "b", world=2)
    assert first.result() == second.result() == ["a", "b"]
    assert stayed == [True]


@pytest.mark.parametrize("comes", [0, 1])
def test_what_an_earlier_attempt_left_is_no_answer(connect, comes):
    """Its workers had met; of the next attempt's, only one comes."""
    meet(connect, {0: "old", 1: "old"})
    [error] = meet(connect, {comes: "new"}, world=2, timeout=SHORT)
    assert isinstance(error, TimeoutError)
    assert f"rank {1 - comes} has not come" in str(error)


def test_rank_0_goes_on_waiting_when_it_has_answered_a_question_of_an_earlier_attempt(connect):
    store = connect()
    meet(connect, {1: "old"}, world=2, timeout=SHORT)  # its rank 0 never came
    stale = f"thalweg/k/answer/{store.get('thalweg/k/asks/1').decode()}"
    with ThreadPoolExecutor(2) as pool:
        first = come(connect, pool, 0, "new 0", world=2)
        store.wait([stale], timedelta(seconds=TIMEOUT))
        second = come(connect, pool, 1, "new 1", world=2)
    assert first.result() == second.result() == ["new 0", "new 1"]


def test_host_of_a_store_is_that_of_its_server():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    inner = dist.PrefixStore("inner", server)
    assert _rendezvous.host_of(dist.PrefixStore("outer", inner)) == "localhost"
    assert _rendezvous.host_of(dist.PrefixStore("outer", dist.HashStore())) == ""
