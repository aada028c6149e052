"""Tests `thalweg profile` on two nodes, with real servers."""

import json
import subprocess
import sys

from harness import environment, servers

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
"""


def test_two_nodes_are_profiled_together_with_their_links_and_bytes(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    with servers() as nothing:
        command = [sys.executable, "-m", "thalweg", "profile", "--nodes", "2", "--steps", "5"]
        command += ["--codec", "fp16", "--out", str(out), str(script)]
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "profile.json").read_text())
    assert found["steps"] == 5
    assert len(found["workers"]) == 2
    assert all(phases["wait"] > 0 for phases in found["workers"])
    measured = found["measured"]
    assert (measured["nodes"], measured["codec"]) == (2, "fp16")
    assert measured["rate"] > 0
    # A node sends half of the 300 * 301 elements as fp16 to the other's shard, and half of the
    # means: its payload of a step is that of all elements.
    assert measured["sent_bytes"] == 2 * 300 * 301
    assert "2 workers on 2 nodes" in done.stdout
