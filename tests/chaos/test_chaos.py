"""Tests that random faults neither change a sum nor leave a job without a reason or a process with
a leak.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import mishaps
import numpy as np
import pytest
from chaos_worker import WORLD, expected_mean, gradient
from fleet import Fleet, hosts_of_nodes, hosts_of_shards

from thalweg_bench.lab import Lab

CHAOS = Path(__file__).with_name("chaos.py")
SEED, SECONDS = 19, 30


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("hosted", [[], ["--hosted"]], ids=["shards", "hosted"])
def test_random_faults_end_in_exact_sums_or_reasons(hosted, tmp_path):
    out = tmp_path / "chaos.json"
    argv = [sys.executable, CHAOS, "--seed", str(SEED), "--seconds", str(SECONDS), *hosted]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*argv, "--out", out], env=env, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["rounds"] > 0
    assert found["mishaps"] > 0


def test_seed_determines_what_happens(tmp_path):
    def first(seed):
        fleet = Fleet(Lab([*hosts_of_nodes(), *hosts_of_shards()]), tmp_path, hosted=False)
        steps = itertools.islice(mishaps.schedule(seed, fleet, without={"lossy link"}), 50)
        return [(gap, list(map(str, planned))) for gap, planned in steps]

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("done", [0, 1])
def test_reference_is_the_mean_of_all_workers(done):
    gradients = np.array([gradient(7, rank, done) for rank in range(WORLD)], dtype=np.float64)
    error = np.abs(expected_mean(7, done) - gradients.mean(axis=0))
    # Each of WORLD - 1 sums rounds once, by half a unit of a partial sum at most.
    assert (error <= WORLD * 2.0**-24 * np.abs(gradients).sum(axis=0) / WORLD).all()
