"""Tests that training goes on when a sidecar is killed and started again."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
from pathlib import Path

import pytest
import reconnecting_jobs
from harness import DEADLINE, Job, metric, servers
from waiting import until

JOBS = Path(reconnecting_jobs.__file__)
KILLS = 6
BUCKETS = 60  # between kills, of about 6 in a step
PATIENT = {"THALWEG_RECONNECT": "60"}  # a restart may take long where others have the machine
BY_AGGREGATORS, HOSTED = "aggregators", "hosted shards"


def child_of(server):
    """The process in which a server with --respawn serves."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return int(children or 0)


def kill(server):
    os.kill(child_of(server), signal.SIGKILL)


def await_buckets(server, job, count):
    """Waits until a sidecar has completed `count` more rounds of buckets."""
    name = "thalweg_sidecar_buckets_total"
    last = metric(server, name) + count
    job.until(f"{count} more rounds of buckets", lambda: metric(server, name) >= last)


def await_return(server, job):
    """Waits until the sidecar's new process has taken up the job."""

    def is_back():
        try:
            return metric(server, "thalweg_sidecar_taken_up_jobs_total") > 0
        except (urllib.error.URLError, ConnectionError, AssertionError):
            return False  # it is not there yet, or has no page yet

    job.until("the sidecar's return", is_back)


def add_sidecars(cluster, way, nodes, *flags, env=PATIENT):
    listen = () if way == BY_AGGREGATORS else ("--shard-listen", "127.0.0.1:0")
    return [cluster.add_sidecar(*flags, *listen, env=env) for _ in range(nodes)]


def train(cluster, folder, sidecars, codec, *, local=1, steps=None, env=None):
    """Starts a job; without `steps` it goes on until there is a file `over` in `folder`."""
    folder.mkdir()
    end = {"UNTIL": str(folder / "over")} if steps is None else {"STEPS": str(steps)}
    variables = {"CODEC": codec, **end, **(env or PATIENT)}
    sidecar_of = [sidecar.address for sidecar in sidecars for _ in range(local)]
    return Job("train", cluster, folder, sidecar_of=sidecar_of, env=variables, jobs=JOBS)


def train_with_kills(tmp_path, way, codec, local, *, kills=KILLS, buckets=BUCKETS):
    """Trains with that many kills in turn, after so many rounds of buckets each, then undisturbed
    for as many steps; returns what both give, the longest time from a kill to the next round, and
    how many residuals shards have lost.
    """
    pauses = []
    with servers(shards=2 if way == BY_AGGREGATORS else 0) as cluster:
        sidecars = add_sidecars(cluster, way, 2, "--respawn")
        job = train(cluster, tmp_path / "restarted", sidecars, codec, local=local)
        for number in range(kills):
            killed, other = sidecars[number % 2], sidecars[1 - number % 2]
            await_buckets(other, job, buckets)
            began = time.monotonic()
            kill(killed)
            await_return(killed, job)
            await_buckets(other, job, 1)
            pauses.append(time.monotonic() - began)
        (tmp_path / "restarted" / "over").touch()
        results = job.results()
        hosts = cluster.aggregators if way == BY_AGGREGATORS else sidecars
        lost = sum(metric(host, "thalweg_shard_lost_residuals_total") for host in hosts)
        again = train(
            cluster, tmp_path / "undisturbed", sidecars, codec, local=local, steps=results[0][0]
        )
        expected = again.results(300)
    assert not re.search("error", job.output, re.I)
    return expected, results, max(pauses), lost


@pytest.mark.parametrize("way", [BY_AGGREGATORS, HOSTED])
@pytest.mark.parametrize(
    ("codec", "local"),
    [
        ("fp32", 2),
        ("fp16", 1),
        ("powersgd:rank=2,start=0,min_rate=1.2", 2),
        ("powersgd:rank=2,start=40,min_rate=1.2", 1),
        ("powersgd:rank=2,start=0,min_rate=1.2;2.*=fp16", 1),
        ("topk:start=0,ratio=0.1", 2),
    ],
)
def test_killed_sidecars_that_come_back_change_no_weight(codec, local, way, tmp_path):
    expected, results, pause, lost = train_with_kills(tmp_path, way, codec, local)
    print(f"{codec}, {way}: from a kill to the first round after it: {pause:.2f} s at most")
    assert results == expected
    assert all(result == results[0] for result in results)
    assert lost == 0


@pytest.mark.parametrize("way", [BY_AGGREGATORS, HOSTED])
def test_killed_sidecar_may_lack_the_results_of_more_chunks_than_windows_have(way, tmp_path):
    env = {**PATIENT, "WIDE": "8"}  # 263 chunks in the largest bucket
    with servers(shards=2 if way == BY_AGGREGATORS else 0) as cluster:
        sidecars = add_sidecars(cluster, way, 2, "--respawn", env=env)
        job = train(cluster, tmp_path / "job", sidecars, "fp32", env=env)
        for _ in range(3):
            await_buckets(sidecars[0], job, 8)
            kill(sidecars[1])
            await_return(sidecars[1], job)
            await_buckets(sidecars[0], job, 1)
        (tmp_path / "job" / "over").touch()
        first, second = job.results()
    assert first == second


@pytest.mark.parametrize("way", [BY_AGGREGATORS, HOSTED])
@pytest.mark.parametrize("codec", ["int8:start=0", "onebit:start=10"])
def test_what_shards_had_left_out_of_results_is_lost_with_a_sidecar_and_counted(
    codec, way, tmp_path
):
    _, results, _, lost = train_with_kills(tmp_path, way, codec, 2)
    assert all(result == results[0] for result in results)
    assert lost > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["fp32", "powersgd:rank=2,start=0,min_rate=1.2"])
@pytest.mark.parametrize("way", [BY_AGGREGATORS, HOSTED])
def test_fifty_kills_of_sidecars_change_no_weight(way, codec, tmp_path):
    # No process is killed in its first second.
    expected, results, pause, _ = train_with_kills(tmp_path, way, codec, 2, kills=50, buckets=400)
    print(f"50 kills, {codec}, {way}: from a kill to the next round: {pause:.2f} s at most")
    assert results == expected
    assert all(result == results[0] for result in results)


def test_sidecar_that_does_not_come_back_is_named(tmp_path):
    with servers() as cluster:
        sidecars = add_sidecars(cluster, HOSTED, 2, env=None)
        job = train(cluster, tmp_path / "job", sidecars, "fp32", env={"THALWEG_RECONNECT": "1"})
        await_buckets(sidecars[0], job, BUCKETS)
        sidecars[1].process.kill()
        sidecars[1].process.wait()
        for worker in job.wait():
            assert worker.code != 0
        for file in Path(sidecars[1].address).parent.glob("s1.sock*"):
            file.unlink()
        reason = rf"the sidecar at {sidecars[1].address} is gone: .*within 1 s"
        assert re.search(reason, job.output), job.output


def choices(cluster, sidecar):
    """How many buckets have which codec, and what each candidate is predicted to take."""
    return re.findall(r"^thalweg_sidecar_auto_.*$", cluster.page(sidecar), re.M)


def test_job_with_auto_goes_on_with_what_the_dead_process_had_chosen(tmp_path):
    with servers() as cluster:
        sidecars = add_sidecars(cluster, HOSTED, 2, "--respawn")
        job = train(cluster, tmp_path / "job", sidecars, "auto:rank=2,start=0")
        await_buckets(sidecars[0], job, BUCKETS)
        before = choices(cluster, sidecars[1])
        kill(sidecars[1])
        await_return(sidecars[1], job)
        await_buckets(sidecars[0], job, BUCKETS)
        after = choices(cluster, sidecars[1])
        (tmp_path / "job" / "over").touch()
        results = job.results()
    assert all(result == results[0] for result in results)
    assert before
    assert after == before


def test_job_that_cannot_go_on_with_another_process_says_why(tmp_path):
    with servers() as cluster:
        sidecars = add_sidecars(cluster, HOSTED, 2, "--respawn", env=None)
        job = train(cluster, tmp_path / "job", sidecars, "fp32", env={"THALWEG_RECONNECT": "0"})
        await_buckets(sidecars[0], job, BUCKETS)
        kill(sidecars[1])
        for worker in job.wait():
            assert worker.code != 0
        reason = "cannot go on with another process: THALWEG_RECONNECT is 0"
        assert reason in job.output, job.output


def test_process_to_which_no_worker_comes_back_ends_long_before_the_first_one_may_come(tmp_path):
    flags = ("--respawn", "--exit-when-idle", "--timeout", "3600", "--reconnect", "1")
    with servers() as cluster:
        (sidecar,) = add_sidecars(cluster, BY_AGGREGATORS, 1, *flags, env=None)
        env = {"THALWEG_RECONNECT": "0"}
        job = train(cluster, tmp_path / "job", [sidecar], "fp32", local=2, env=env)
        await_buckets(sidecar, job, BUCKETS)
        kill(sidecar)
        for worker in job.wait():
            assert worker.code != 0
        assert sidecar.process.wait(DEADLINE) == 0


def test_program_that_is_told_to_end_takes_its_child_along(tmp_path):
    with servers() as cluster:
        (sidecar,) = add_sidecars(cluster, HOSTED, 1, "--respawn")
        child = child_of(sidecar)
        assert sidecar.stop(grace=20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_sidecar_is_started_again_also_where_its_starter_ignores_the_ends_of_children(tmp_path):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which programs inherit
    try:
        with servers() as cluster:
            [sidecar] = add_sidecars(cluster, HOSTED, 1, "--respawn")
            first = child_of(sidecar)
            os.kill(first, signal.SIGKILL)
            until("another process", lambda: child_of(sidecar) != first, DEADLINE)
    finally:
        signal.signal(signal.SIGCHLD, before)
