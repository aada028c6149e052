"""Tests `thalweg run --compare` with real runs of a script."""

from __future__ import annotations

import subprocess
import sys

from harness import DEADLINE, environment, servers

SCRIPT = """
import gc, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 100))
if sys.argv[1:] == ["attach"]:
    import thalweg.ddp
    state = thalweg.ddp.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(4, 1000)).sum().backward()
    optimizer.step()
state = None
del model, optimizer
gc.collect()
dist.destroy_process_group()
"""


def compare(tmp_path, *arguments):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "thalweg", "run", "--compare", "--nodes", "2"]
    with servers() as nothing:
        return subprocess.run(
            [*command, "--codec", "fp16", str(script), *arguments],
            env=environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )


def test_script_runs_plainly_and_with_the_codec_and_both_are_tabulated(tmp_path):
    done = compare(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:34].strip(): line[34:].split() for line in done.stdout.splitlines()}
    assert rows["optimizer steps"] == ["5", "5"]
    assert all(float(cell) > 0 for cell in rows["ms per step, median"])
    # 1000 * 100 + 100 elements of 4 bytes, of which a ring of two carries all; fp16 halves them.
    assert rows["MB over a node's link per step"] == ["0.4", "*", "0.2"]
    assert done.stderr.count("is attached as job-") == 1  # the first run is plain DDP


def test_script_that_attaches_itself_is_refused(tmp_path):
    done = compare(tmp_path, "attach")
    assert done.returncode == 2
    assert "the script calls attach() by itself" in done.stderr
