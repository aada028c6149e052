"""Tests forked workers: their answers, their failures, their end."""

import os
import signal
import threading

import pytest

from thalweg_bench import resources
from thalweg_bench.crew import Crew
from thalweg_bench.resources import Usage
from thalweg_bench.rows import BenchError


class Target:
    def __init__(self, rank):
        self.rank = rank

    def do_add(self, number):
        return self.rank + number

    def do_fail(self):
        if self.rank == 1:
            raise ValueError("too much")

    def do_die(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def do_hang(self):
        if self.rank == 1:
            threading.Event().wait()


@pytest.fixture
def crew():
    crew = Crew()
    for rank in range(2):
        crew.fork(f"worker {rank}", lambda rank=rank: Target(rank))
    yield crew
    pids = crew.pids
    crew.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_answers_come_in_order_of_forking(crew):
    assert crew.call("add", 10, seconds=20) == [10, 11]


def test_failure_is_reported_with_the_name_of_who_failed(crew):
    with pytest.raises(BenchError, match="worker 1: 'fail' failed: ValueError: too much"):
        crew.call("fail", seconds=20)


def test_death_is_reported_with_the_signal(crew):
    with pytest.raises(BenchError, match="worker 1 was killed by SIGKILL during 'die'"):
        crew.call("die", seconds=20)


def test_who_hangs_is_named(crew):
    crew.call("add", 0, seconds=20)  # both have started
    with pytest.raises(BenchError, match=r"no answer within 1 s to 'hang' from: worker 1$"):
        crew.call("hang", seconds=1)


def test_cpu_seconds_are_the_process_times():
    before, times = resources.cpu_seconds(os.getpid()), os.times()
    while sum(os.times()[:2]) - sum(times[:2]) < 0.2:
        pass
    assert resources.cpu_seconds(os.getpid()) - before == pytest.approx(0.2, abs=0.05)


def test_usage_counts_only_between_start_and_stop(monkeypatch):
    clock = iter([1.0, 2.0, 10.0, 10.5])
    monkeypatch.setattr(resources, "cpu_seconds", lambda _: next(clock))
    sent = iter([1_000_000, 2_000_000, 5_000_000, 8_000_000])
    monkeypatch.setattr(resources, "sent_bytes", lambda _: next(sent))
    usage = Usage({"aggregator": [os.getpid()], "sidecar": []})
    for _ in range(2):
        usage.start()
        usage.stop()
    entries = usage.report("c", {"aggregator": 5e8, "sidecar": 1.0})
    assert [entry["process"] for entry in entries] == ["aggregator max", "aggregator mean"]
    assert entries[0]["cpu_s_per_gb"] == 1.5
    assert entries[0]["sent_mb"] == 2
    assert entries[0]["rss_mb"] > 1
    assert set(entries[0]) == {"case", "process", "cpu_s_per_gb", "rss_mb", "sent_mb"}


def test_usage_of_many_rounds_is_that_of_one_on_average(monkeypatch):
    clock, sent = iter([1.0, 3.0]), iter([0, 40_000_000])
    monkeypatch.setattr(resources, "cpu_seconds", lambda _: next(clock))
    monkeypatch.setattr(resources, "sent_bytes", lambda _: next(sent))
    usage = Usage({"sidecar": [os.getpid()]})
    usage.start()
    usage.stop(rounds=10)
    (most, mean) = usage.report("c", {"sidecar": 1e8}, lambda _: 7.0)
    assert (most["cpu_s_per_gb"], most["sent_mb"], most["rss_mb"]) == (2.0, 4.0, 7.0)
    assert mean == most | {"process": "sidecar mean"}


def test_bytes_sent_are_those_of_the_link(monkeypatch):
    text = (
        "Inter-|   Receive                |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs\n"
        "    lo: 1 2 3 4 5 6 7 8 900 10 11 12 13 14 15 16\n"
        "  eth0: 1 2 3 4 5 6 7 8 1234 10 11 12 13 14 15 16\n"
    )
    monkeypatch.setattr(resources.Path, "read_text", lambda *_, **__: text)
    assert resources.sent_bytes(1) == 1234
