"""Tests training libraries as their users run them, without code of ours: docs/frameworks.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import launching
import pytest
from client_scripts import LONG, SCRIPTS, SECONDS, SHORT, VARIABLES
from harness import DEADLINE, environment, servers

CLIENTS = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
RUN = [sys.executable, "-m", "thalweg", "run", "--nodes", "2"]


def run(client, phase, tmp_path):
    """Returns what both workers have seen, and the output."""
    arguments = [str(SCRIPTS / f"{client}.py"), phase, str(tmp_path)]
    if client == "accelerated":
        output = launching.run(launching.accelerate, arguments, tmp_path, VARIABLES)
    else:
        output = run_cluster(arguments, tmp_path)
    files = [tmp_path / f"{phase}{rank}.json" for rank in (0, 1)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files], output


def run_cluster(arguments, tmp_path):
    """Does it with `thalweg run`."""
    with servers() as nothing:
        env = environment(nothing.folder) | VARIABLES | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [*RUN, *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        for left in nothing.folder.glob("torchinductor_*"):  # not ours
            shutil.rmtree(left)
    output: str = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize("client", CLIENTS)
def test_library_trains_as_with_plain_ddp_and_resumes_compressed(client, tmp_path):
    first, _ = run(client, "first", tmp_path)
    for found in first:
        assert found["plain"]["codec"] is None
        assert found["fp32"]["codec"].startswith("fp32")
        assert found["fp32"]["sent"] == found["fp32"]["raw"] > 0
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert found["fp32"]["digest"] == found["plain"]["digest"]
        assert 0.5 < found["saves"]["sent"] / found["saves"]["raw"] < 0.8  # 4 of 8 steps are whole
    second, output = run(client, "second", tmp_path)
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    for found in second:
        assert found["resumes"]["sent"] < found["resumes"]["raw"] / 2  # both steps are compressed
    assert second[0]["resumes"]["digest"] == second[1]["resumes"]["digest"]


def test_hooks_that_accelerate_is_asked_for_win_and_each_is_said(tmp_path):
    found, output = run("accelerated", "hooks", tmp_path)
    for results in found:
        asked = {name for name, result in results.items() if result["codec"] is None}
        assert asked == {"fp16", "bf16", "power_sgd", "batched_power_sgd"}
        assert results["no"]["codec"] == "fp16"
    names = ["fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"]
    for name in names:
        assert output.count(f"keeps its communication hook {name}, which wins over") == 1


HOOKED = """
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
accelerator = Accelerator(cpu=True, kwargs_handlers=[hook])
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    accelerator.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
"""


def test_hook_that_accelerate_is_asked_for_wins_and_the_doctor_says_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HOOKED)
    with servers() as nothing:
        done = subprocess.run(
            [sys.executable, "-m", "thalweg", "doctor", "--codec", "fp16", str(script)],
            env=environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    assert done.returncode == 1
    assert "is not attached: its communication hook bf16_compress_hook wins over" in done.stdout
