"""Tests that over time everything arrives, whatever a step leaves out or discards."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, servers

pytestmark = pytest.mark.numeric

SCRIPT = Path(__file__).parent / "residual_jobs.py"


def run(name, folder):
    with servers(nodes=2, shards=2) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        return Job(name, cluster, folder, sidecar_of=sockets, jobs=SCRIPT).results()


def test_gradients_of_heads_that_steps_leave_out_arrive_or_are_held_back(tmp_path):
    for result in run("delivered", tmp_path):
        for case, errors in result.items():
            for name, error in errors.items():
                assert error <= 1, (case, name)


def test_what_shards_have_left_out_survives_that_buckets_are_cut_anew(tmp_path):
    for result in run("resumed", tmp_path):
        for codec, runs in result.items():
            assert runs["resumed"] == runs["straight"], codec
