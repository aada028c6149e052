"""Tests sidecars that fold with several threads, as they do by default from 16 processors on."""

from __future__ import annotations

from pathlib import Path

import pytest
import reconnecting_jobs
from harness import Job, servers

JOBS = Path(reconnecting_jobs.__file__)


@pytest.mark.parametrize("window", ["1", "2", "auto"])
def test_nodes_do_not_wait_for_each_other_whichever_thread_is_first_with_a_chunk(window, tmp_path):
    env = {
        "WIDE": "24",
        "CHUNK": "65536",
        "STEPS": "20",
        "CODEC": "fp32",
        "THALWEG_STEP_TIMEOUT": "30",
    }
    results = []
    for threads in ("1", "4"):
        with servers(shards=1) as cluster:
            flags = ["--threads", threads, "--window-chunks", window]
            sidecars = [cluster.add_sidecar(*flags).address for _ in range(2)]
            folder = tmp_path / threads
            folder.mkdir()
            job = Job("train", cluster, folder, sidecar_of=sidecars, env=env, jobs=JOBS)
            results += job.results()
    assert all(result == results[0] for result in results)
