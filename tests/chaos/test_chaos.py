"""Tests that random faults neither change a sum nor leave a job without a reason or a process with
a leak.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

CHAOS = Path(__file__).with_name("chaos.py")
SEED, SECONDS = 19, 30


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
