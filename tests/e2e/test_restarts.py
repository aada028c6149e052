"""Tests that training goes on when an aggregator is killed and started again."""

from __future__ import annotations

import json
import re
import select
import time
from pathlib import Path

import pytest
import reconnecting_jobs
from harness import DEADLINE, Job, metric, servers

JOBS = Path(reconnecting_jobs.__file__)
KILLS = 4
ROUNDS = 50  # between kills


def rounds(cluster):
    """The rounds that the aggregators have completed since they were started."""
    pages = [json.loads(cluster.page(each, "/api/v1/jobs")) for each in cluster.aggregators]
    return sum(job["rounds"] for page in pages for job in page["jobs"])


def await_rounds(cluster, job, count):
    """Waits until the aggregators have completed `count` more rounds."""
    last = rounds(cluster) + count
    while rounds(cluster) < last:
        assert job.workers[0].process.poll() is None, job.output
        select.select([], [], [], 0.005)


def await_resumption(aggregator, job):
    while metric(aggregator, "thalweg_shard_resumed_jobs_total") == 0:
        assert job.workers[0].process.poll() is None, job.output
        select.select([], [], [], 0.005)


def kill(cluster, number):
    aggregator = cluster.aggregators.pop(number)
    aggregator.process.kill()
    aggregator.process.wait()
    return aggregator.address


def train(cluster, folder, codec, steps=None, env=None):
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
    with servers(shards=2) as cluster:
        job = train(cluster, tmp_path / "restarted", codec)
        for _ in range(KILLS):
            await_rounds(cluster, job, ROUNDS)
            began = time.monotonic()
            cluster.add_aggregator(listen=kill(cluster, 0))  # the next kill is of the other one
            await_resumption(cluster.aggregators[-1], job)
            await_rounds(cluster, job, 1)
            pauses.append(time.monotonic() - began)
        (tmp_path / "restarted" / "over").touch()
        results = job.results(DEADLINE)
        returns = [
            metric(sidecar, "thalweg_sidecar_shard_returns_total") for sidecar in cluster.sidecars
        ]
        lost = sum(
            metric(aggregator, "thalweg_shard_lost_residuals_total")
            for aggregator in cluster.aggregators
        )
        expected = train(cluster, tmp_path / "undisturbed", codec, results[0][0]).results()
    print(f"{codec}: from the kill to the first round after it: {max(pauses):.2f} s at most")
    assert returns == [KILLS, KILLS]
    assert results[0] == results[1]
    assert (lost > 0) == (codec == "onebit")  # only shards with residuals lose something
    if codec != "onebit":
        assert results == expected
    assert not re.search("error", job.output, re.I)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_demo_ends_with_the_same_parameters_when_aggregators_are_killed(tmp_path):
    patience, pauses, parameters = 300.0, [], []
    with servers(shards=2) as cluster:
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        for kills in (0, KILLS):
            folder = tmp_path / str(kills)
            folder.mkdir()
            sidecar_of = [sidecars[0]] * 2 + [sidecars[1]] * 2
            env = {"CODEC": "fp16"}
            job = Job("fashion", cluster, folder, sidecar_of=sidecar_of, env=env, jobs=JOBS)
            for _ in range(kills):
                await_rounds(cluster, job, ROUNDS)
                began = time.monotonic()
                cluster.add_aggregator(listen=kill(cluster, 0))
                await_resumption(cluster.aggregators[-1], job)
                await_rounds(cluster, job, 1)
                pauses.append(time.monotonic() - began)
            assert all(worker.code == 0 for worker in job.wait(patience)), job.output
            history = json.loads(job.workers[0].out.read_text())
            assert history["replicas_identical"]
            parameters.append(history["parameters_sha256"])
    print(f"demo: from the kill to the first round after it: {max(pauses):.2f} s at most")
    assert parameters[0] == parameters[1]


def test_aggregator_that_does_not_come_back_is_named(tmp_path):
    with servers(shards=2) as cluster:
        job = train(cluster, tmp_path / "job", "fp32", env={"THALWEG_RECONNECT": "1"})
        await_rounds(cluster, job, ROUNDS)
        address = kill(cluster, 1)
        for worker in job.wait():
            assert worker.code != 0
        reason = rf"lost the connection to aggregator shard 1 at {address}: .*within 1 s"
        assert re.search(reason, job.output), job.output
