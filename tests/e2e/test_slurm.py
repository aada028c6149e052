"""Tests tasks of Slurm, of which srun's variables are here, and srun itself is not."""

from __future__ import annotations

import json
import signal
import sys

import launching
import pytest
from client_scripts import SCRIPTS

# A task that is killed fails srun's step, and srun then ends the others: --kill-on-bad-exit.
KILLED = -signal.SIGKILL
CODEC = {"THALWEG_CODEC": "fp32"}


def srun(node, port):
    """Returns the command of a task, with the variables that srun gives to one task per node."""
    variables = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NUM_NODES": launching.NODES,
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NODELIST": "node[0-1]",
        "SLURM_NNODES": launching.NODES,
        "SLURM_NODEID": node,
        "SLURM_NTASKS": launching.NODES,
        "SLURM_NTASKS_PER_NODE": 1,
        "SLURM_PROCID": node,
        "SLURM_LOCALID": 0,
        # Batch scripts export these two.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable]


def run(client, phase, folder, env=CODEC):
    """Returns what both tasks have seen, and the output."""
    output = launching.run(srun, command(client, phase, folder), folder, env)
    return [json.loads((folder / f"{phase}{rank}.json").read_text()) for rank in (0, 1)], output


def command(client, phase, folder):
    return [str(SCRIPTS / f"{client}.py"), phase, str(folder)]


READERS = ["slurm_script"]
READERS += [
    pytest.param(n, marks=pytest.mark.long) for n in ("lightning_training", "timm_training")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", READERS)
def test_tasks_with_sruns_variables_train_as_with_plain_ddp_and_resume_compressed(client, tmp_path):
    first, _ = run(client, "first", tmp_path)
    for found in first:
        assert found["plain"]["codec"] is None
        assert found["fp32"]["sent"] == found["fp32"]["raw"] > 0
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert found["fp32"]["digest"] == found["plain"]["digest"]
    second, output = run(client, "second", tmp_path)
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    for found in second:
        assert found["resumes"]["sent"] < found["resumes"]["raw"] / 2  # both steps are compressed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", READERS)
def test_job_of_slurm_that_is_requeued_after_a_kill_goes_on_as_if_undisturbed(client, tmp_path):
    variables = CODEC | {"THALWEG_RESIDUALS": str(tmp_path / "residuals")}
    codes, _ = launching.attempt(srun, command(client, "killed", tmp_path), tmp_path, variables)
    assert codes[1] == KILLED
    assert codes[0] != 0
    requeued = variables | {"SLURM_RESTART_COUNT": "1"}  # Slurm keeps the number of the job
    found, output = run(client, "killed", tmp_path, requeued)
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    for worker in found:
        assert 0 < worker["resumes"]["sent"] < worker["resumes"]["raw"] / 2  # both steps
        assert worker["resumes"]["digest"] == found[0]["whole"]["digest"]
