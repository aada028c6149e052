"""Tests that training goes on when an aggregator is killed and started again."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import reconnecting_jobs
from harness import DEADLINE, Job, metric, servers
from ports import free_port

JOBS = Path(reconnecting_jobs.__file__)
KILLS = 4
ROUNDS = 50  # between kills
PATIENT = {"THALWEG_RECONNECT": "60"}  # a restart may take long where others have the machine


def await_resumption(aggregator, job):
    name = "thalweg_shard_resumed_jobs_total"
    job.until("the job at the new aggregator", lambda: metric(aggregator, name) > 0)


def returns(cluster):
    """How often each node has gone on at a shard that was restarted."""
    name = "thalweg_sidecar_shard_returns_total"
    return [metric(sidecar, name) for sidecar in cluster.sidecars]


def two_shards(cluster):
    """Adds aggregators whose ports are given to nobody else when they are killed."""
    for _ in range(2):
        cluster.add_aggregator(listen=f"127.0.0.1:{free_port()}")


def train(cluster, folder, codec, steps=None, env=PATIENT):
    """Starts a job; without `steps` it goes on until there is a file `over` in `folder`."""
    folder.mkdir()
    sidecars = [cluster.add_sidecar(env=env).address for _ in range(2)]
    end = {"UNTIL": str(folder / "over")} if steps is None else {"STEPS": str(steps)}
    return Job(
        "train", cluster, folder, sidecar_of=sidecars, env={"CODEC": codec, **end}, jobs=JOBS
    )


@pytest.mark.parametrize("codec", ["fp32", "onebit", "powersgd:rank=2,start=2"])
def test_killed_aggregators_that_come_back_end_no_job(codec, tmp_path):
    pauses = []
    with servers() as cluster:
        two_shards(cluster)
        job = train(cluster, tmp_path / "restarted", codec)
        for kill in range(1, KILLS + 1):
            job.await_rounds(ROUNDS)
            began = time.monotonic()
            address = cluster.kill_aggregator(0)  # the next kill is of the other one
            cluster.add_aggregator(listen=address)
            await_resumption(cluster.aggregators[-1], job)
            job.await_rounds(1)
            pauses.append(time.monotonic() - began)
            # That round may be one of the other aggregator's.
            job.until("the return", lambda: min(returns(cluster)) == kill)  # noqa: B023
        (tmp_path / "restarted" / "over").touch()
        results = job.results(DEADLINE)
        returned = returns(cluster)
        lost = sum(
            metric(aggregator, "thalweg_shard_lost_residuals_total")
            for aggregator in cluster.aggregators
        )
        expected = train(cluster, tmp_path / "undisturbed", codec, results[0][0]).results()
    print(f"{codec}: from the kill to the first round after it: {max(pauses):.2f} s at most")
    assert returned == [KILLS, KILLS]
    assert results[0] == results[1]
    assert (lost > 0) == (codec == "onebit")  # only shards with residuals lose something
    if codec != "onebit":
        assert results == expected
    assert not re.search("error", job.output, re.I)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_demo_ends_with_the_same_parameters_when_aggregators_are_killed(tmp_path):
    patience, pauses, parameters = 300.0, [], []
    with servers() as cluster:
        two_shards(cluster)
        sidecars = [cluster.add_sidecar(env=PATIENT).address for _ in range(2)]
        for kills in (0, KILLS):
            folder = tmp_path / str(kills)
            folder.mkdir()
            sidecar_of = [sidecars[0]] * 2 + [sidecars[1]] * 2
            env = {"CODEC": "fp16"}
            job = Job("fashion", cluster, folder, sidecar_of=sidecar_of, env=env, jobs=JOBS)
            for _ in range(kills):
                job.await_rounds(ROUNDS)
                began = time.monotonic()
                cluster.add_aggregator(listen=cluster.kill_aggregator(0))
                await_resumption(cluster.aggregators[-1], job)
                job.await_rounds(1)
                pauses.append(time.monotonic() - began)
            assert all(worker.code == 0 for worker in job.wait(patience)), job.output
            history = json.loads(job.workers[0].out.read_text())
            assert history["replicas_identical"]
            parameters.append(history["parameters_sha256"])
    print(f"demo: from the kill to the first round after it: {max(pauses):.2f} s at most")
    assert parameters[0] == parameters[1]


def test_aggregator_that_does_not_come_back_is_named(tmp_path):
    with servers() as cluster:
        two_shards(cluster)
        job = train(cluster, tmp_path / "job", "fp32", env={"THALWEG_RECONNECT": "1"})
        job.await_rounds(ROUNDS)
        address = cluster.kill_aggregator(1)
        for worker in job.wait():
            assert worker.code != 0
        reason = rf"lost the connection to aggregator shard 1 at {address}: .*within 1 s"
        assert re.search(reason, job.output), job.output
