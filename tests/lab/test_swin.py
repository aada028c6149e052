"""Tests that the Swin example trains on hosts of the laboratory network, and draws its runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg.examples.swin import prepare

SCRIPT = Path(__file__).parent / "swin.py"
STEPS = 4
pytestmark = pytest.mark.alone
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@needs_root
@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_runs_train_on_two_hosts_and_the_optimised_one_sends_less(tmp_path):
    data, output = tmp_path / "data", tmp_path / "output"
    prepare.prepare(data, classes=2, train=4 * STEPS, val=2, size=36, quiet=True)
    options = ("--data", data, "--output", output, "--codec", "powersgd:rank=4,start=1")
    steps = ("TRAIN.STEPS", STEPS, "PRINT_FREQ", 1)
    done = run("--nodes", 2, "--nproc", 1, "--rate", "1gbit", *options, "--opts", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = output / "tiny_2x1_1gbit"
    runs = ("baseline_ddp_O1", "optimised_thalweg_O2")
    for name in runs:
        assert sorted(path.parent.name for path in folder.glob(f"{name}/seed0/*/log")) == ["0", "1"]
    rows = json.loads((output / "tiny_2x1_1gbit.json").read_text())
    baseline, optimised = (rows[name]["seed0"] for name in runs)
    assert baseline["workers"] == optimised["workers"] == 2
    # A ring of two carries 4.9 million gradients, their factors of rank 4 are a thirtieth.
    assert 19 < baseline["sent_mb"] < 25
    assert optimised["sent_mb"] < baseline["sent_mb"] / 10
    assert (output / "tiny_2x1_1gbit.png").is_file()


def test_malformed_rate_is_refused():
    done = run("--rate", "fast")
    assert done.returncode == 2
    assert done.stderr.startswith("swin: ")
