"""Tests Ray Train with variables only, on a cluster of two Ray nodes: docs/frameworks.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment, servers

SCRIPT = Path(__file__).parent / "clients" / "ray_training.py"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # it takes a minute


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns what both workers have seen in each training, and the output."""
    folder = tmp_path_factory.mktemp("ray")
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    with servers() as cluster:
        nodes = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in range(2)]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), *(n.address for n in nodes)],
            env=environment(cluster.folder) | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=500,
        )
        shutil.rmtree(cluster.folder / "ray")  # not ours
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    names = ("plain", "fp32", "resumed", "undisturbed")
    found = {n: [json.loads((folder / f"{n}{r}.json").read_text()) for r in (0, 1)] for n in names}
    return found, output


def test_ray_trains_as_with_plain_ddp(trained):
    found, _ = trained
    for plain, whole in zip(found["plain"], found["fp32"], strict=True):
        assert plain["codec"] is None
        assert whole["codec"].startswith("fp32")
        assert whole["sent"] == whole["raw"] > 0
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert whole["digest"] == plain["digest"]


def test_ray_starts_a_killed_worker_again_which_goes_on_compressed_as_if_undisturbed(trained):
    found, output = trained
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    assert output.count("what nodes held back of gradients goes on, from files") == 1
    for resumed in found["resumed"]:
        assert resumed["began"] == 8
        assert resumed["sent"] < resumed["raw"] / 2  # all four steps are compressed
    digests = {worker["digest"] for worker in [*found["resumed"], *found["undisturbed"]]}
    assert len(digests) == 1
