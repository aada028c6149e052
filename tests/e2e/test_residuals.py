"""Tests that over time everything arrives, whatever a step leaves out or discards."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, servers

pytestmark = pytest.mark.numeric

SCRIPT = Path(__file__).parent / "residual_jobs.py"


def run(name, folder):
    return run_job(name, folder).results()


def run_job(name, folder):
    """Returns the job when it has ended."""
    with servers(nodes=2, shards=2) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        job = Job(name, cluster, folder, sidecar_of=sockets, jobs=SCRIPT)
        job.wait()
    return job


def test_gradients_of_heads_that_steps_leave_out_arrive_or_are_held_back(tmp_path):
    for result in run("delivered", tmp_path):
        for case, errors in result.items():
            for name, error in errors.items():
                assert error <= 1, (case, name)


def test_what_shards_have_left_out_survives_that_buckets_are_cut_anew(tmp_path):
    for result in run("resumed", tmp_path):
        for codec, runs in result.items():
            assert runs["resumed"] == runs["straight"], codec


def test_job_that_leaves_behind_what_an_earlier_one_holds_back_says_so_once(tmp_path):
    job = run_job("wrapped_anew", tmp_path)
    first, second, third = job.results()[0]
    said = [
        [line for line in w.output.splitlines() if "are those of job" in line] for w in job.workers
    ]
    for line, later, earlier in zip(said[0], [second, third], [first, second], strict=True):
        assert (
            f"job {later}: 10 of its parameters (parts.0.weight, …) are those of job {earlier}"
            in line
        )
    assert said[1] == []
