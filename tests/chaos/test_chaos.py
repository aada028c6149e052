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
from chaos_worker import TIMEOUT, WORLD, expected_mean, gradient
from fleet import Fleet, hosts_of_nodes, hosts_of_shards

from thalweg_bench.lab import Lab

CHAOS = Path(__file__).with_name("chaos.py")
SEED = 19
MUST, MAY, MUST_NOT = "must go on", "may go on", "must not go on"
# What happens to a job, by the rows of docs/faults.md.
ROWS = {
    "SIGKILL": MUST_NOT,  # 1, 4, 7
    "SIGKILL and restart": MUST,  # 6
    "SIGSTOP": MUST,  # 3a
    "long SIGSTOP": MAY,  # 3, 7
    "reset": MUST,  # 11
    "cut": MUST,  # 9
    "long cut": MAY,  # 9
    "one-way cut": MUST,  # 10
    "long one-way cut": MAY,  # 10
    "SIGKILL behind a cut": MUST_NOT,  # 4, 7
    "slow link": MUST,  # 13
    "lossy link": MUST,  # 11, 12
}
ONLY_FOR_SHARDS = {"SIGKILL and restart"}
KERNELS = {"reset", "lossy link"}  # not every kernel has them
AT_ONCE = 3.0
SLACK = 4.0  # for two busy cores, beyond the deadline of whoever is awaited


def assert_as_documented(fate):
    what, victim = fate["kind"].split(" of a ")
    if not fate["reason"]:
        assert ROWS[what] != MUST_NOT, fate
        assert fate["seconds"] < TIMEOUT + SLACK, fate
        return
    assert ROWS[what] != MUST, fate
    is_seen_at_once = (what, victim) == ("SIGKILL", "worker")
    assert fate["seconds"] < (AT_ONCE if is_seen_at_once else TIMEOUT + SLACK), fate
    if is_seen_at_once:
        assert fate["victims"][0].replace("rank", "rank ") in fate["reason"], fate


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize(
    "hosted",
    [
        pytest.param([], id="shards"),
        pytest.param(["--hosted"], id="hosted", marks=pytest.mark.long),
    ],
)
def test_random_faults_end_in_exact_sums_or_reasons(hosted, tmp_path):
    out = tmp_path / "chaos.json"
    argv = [sys.executable, CHAOS, "--seed", str(SEED), "--seconds", "0", *hosted]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([*argv, "--out", out], env=env, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["rounds"] > 0
    assert set(found["impossible"]) <= KERNELS
    alone = [fate for fate in found["fates"] if len(fate["victims"]) == 1]
    expected = ROWS.keys() - set(found["impossible"]) - (ONLY_FOR_SHARDS if hosted else set())
    assert {fate["kind"].split(" of a ")[0] for fate in alone} == expected
    for fate in alone:
        assert_as_documented(fate)


def planned_first(seed, count, folder):
    fleet = Fleet(Lab([*hosts_of_nodes(), *hosts_of_shards()]), folder, hosted=False)
    schedule = mishaps.schedule(seed, fleet, without={"lossy link"})
    return list(itertools.islice(schedule, count))


def test_seed_determines_what_happens(tmp_path):
    def first(seed):
        return [(gap, [*map(str, plan)]) for gap, plan in planned_first(seed, 50, tmp_path)]

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("seed", range(5))
def test_everything_that_is_possible_happens_once_before_anything_happens_again(seed, tmp_path):
    kinds = ROWS.keys() - {"lossy link"}
    plans = [plan for _, plan in planned_first(seed, len(kinds), tmp_path)]
    assert sorted(mishap.what for [mishap] in plans) == sorted(kinds)


@pytest.mark.parametrize("done", [0, 1])
def test_reference_is_the_mean_of_all_workers(done):
    gradients = np.array([gradient(7, rank, done) for rank in range(WORLD)], dtype=np.float64)
    error = np.abs(expected_mean(7, done) - gradients.mean(axis=0))
    # Each of WORLD - 1 sums rounds once, by half a unit of a partial sum at most.
    assert (error <= WORLD * 2.0**-24 * np.abs(gradients).sum(axis=0) / WORLD).all()
