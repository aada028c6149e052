"""Tests the command that runs torch's own tests of fully_shard() over several back ends.

Those tests are not in torch's wheel, so that these bring some of the same form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).with_name("fsdp2.py")

# As torch's own: it names GPUs and NCCL's harness.
MADE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread

assert torch.accelerator.current_accelerator().type == "cpu"


def train(case):
    layer = torch.nn.Linear(4, 4, bias=False).cuda()
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=init_device_mesh("cuda", (case.world_size,)))
    layer(torch.full((1, 4), case.rank + 1.0, device="cuda")).sum().backward()
    case.assertEqual(layer.weight.grad.full_tensor(), torch.full((4, 4), 1.5))
    return layer


class Processes(FSDPTest):
    world_size = property(lambda self: min(2, torch.cuda.device_count()))

    @skip_if_lt_x_gpu(2)
    def test_gradient_is_the_mean(self):
        train(self)

    @skip_if_lt_x_gpu(2)
    def test_it_trains_over_gloo(self):
        train(self)
        self.assertEqual(dist.get_backend(), "gloo")

    @skip_if_lt_x_gpu(8)
    def test_many(self):
        raise AssertionError


class Continuous(FSDPTestContinuous):
    def test_gradient_is_the_mean(self):
        train(self)


class Threads(FSDPTestMultiThread):
    def test_nothing(self):
        raise AssertionError
"""
THREADS = "its ranks are threads, on a back end of torch's own"


def run(folder, backends, only=""):
    """Returns the command's exit code, what it prints, and by back end the outcomes of tests."""
    (folder / "test_fully_shard_made.py").write_text(MADE)
    (folder / "test_fully_shard_torn.py").write_text("import nothing_of_that_name")
    (folder / "test_fully_shard_memory.py").write_text("raise SystemExit('it is not to be loaded')")
    out = folder / "outcomes.json"
    argv = [str(folder), "--world-size", "2", "--only", only, "--json", str(out)]
    argv += ["--backend", *backends]
    env = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # as importing Lightning leaves it
    done = subprocess.run(
        [sys.executable, str(COMMAND), *argv], env=env, timeout=100, capture_output=True, text=True
    )
    found = json.loads(out.read_text())
    left_out = found.pop("left out")
    outcomes = {
        backend: {name.partition(" ")[2]: each["outcome"] for name, each in tests.items()}
        for backend, tests in found.items()
    }
    return done, outcomes, left_out


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("made"), ["gloo", "thalweg"])


def test_tests_for_gpus_run_on_the_cpu_over_each_back_end(ran):
    _, outcomes, _ = ran
    assert outcomes["gloo"] == {
        "Processes.test_gradient_is_the_mean": "passed",
        "Processes.test_it_trains_over_gloo": "passed",
        "Processes.test_many": "skipped",
        "Continuous.test_gradient_is_the_mean": "passed",
        "Threads.test_nothing": "skipped",
    }
    assert outcomes["thalweg"] == outcomes["gloo"] | {
        "Processes.test_it_trains_over_gloo": "failed"
    }


def test_what_fails_over_the_last_back_end_alone_is_named_and_makes_the_command_fail(ran):
    done, _, _ = ran
    assert done.returncode == 1
    assert "| made | 3 / 2 / 0 | 2 / 2 / 1 |" in done.stdout
    said = "failed over thalweg and passed over gloo:\n  made: Processes.test_it_trains_over_gloo"
    assert said in done.stdout
    assert f"skipped 1: {THREADS}" in done.stdout
    assert "skipped 1: it needs 8 workers" in done.stdout


def test_files_that_are_left_out_are_named_with_the_reason(ran):
    _, _, left_out = ran
    assert left_out["memory"] == "measures a GPU's memory"
    assert "No module named 'nothing_of_that_name'" in left_out["torn"]


def test_tests_that_fail_over_both_back_ends_do_not_make_the_command_fail(tmp_path):
    done, outcomes, _ = run(tmp_path, ["nonesuch", "nonesuch2"], "Processes.test_gradient")
    assert done.returncode == 0
    assert outcomes["nonesuch"]["Processes.test_gradient_is_the_mean"] == "failed"
