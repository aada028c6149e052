"""Tests `thalweg profile` on two nodes, with real servers."""

import json
import subprocess
import sys

import pytest
from harness import environment, servers

from thalweg.cli._profile_exchange import Exchange

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
"""


def profile(tmp_path, *options, **more):
    """Returns what `thalweg profile` prints of two nodes, and what it writes as JSON."""
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    with servers() as nothing:
        command = [sys.executable, "-m", "thalweg", "profile", "--nodes", "2", "--steps", "5"]
        command += [*options, "--out", str(out), str(script)]
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | more
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((out / "profile.json").read_text())


def test_two_nodes_are_profiled_together_with_their_links_and_bytes(tmp_path):
    said, found = profile(tmp_path, "--codec", "fp16")
    assert found["steps"] == 5
    assert len(found["workers"]) == 2
    assert all(phases["wait"] > 0 for phases in found["workers"])
    measured = found["measured"]
    assert (measured["nodes"], measured["exchange"]["codec"]) == (2, "fp16")
    assert measured["rate"] > 0
    # A node sends half of the 300 * 301 elements as fp16 to the other's shard, and half of the
    # means: its payload of a step is that of all elements.
    assert measured["sent_bytes"] == 2 * 300 * 301
    assert "2 workers on 2 nodes" in said


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"THALWEG_PS": "sgd"}, "served"),
        ({"THALWEG_PS_MODE": "local", "THALWEG_PS_EVERY": "2"}, "local"),
    ],
)
def test_profile_says_whose_optimizer_steps(tmp_path, variables, kind):
    said, found = profile(tmp_path, **variables)
    assert found["measured"]["exchange"]["kind"] == kind
    assert found["measured"]["sent_bytes"] > 0
    assert Exchange(kind).said() in said
    assert "torch averages" not in said
    assert "THALWEG_FUSED_OPTIMIZER" not in said
