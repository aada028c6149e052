"""Trains the Swin example on 2 nodes x 1 worker, sharded and with its optimizer on shards, beside
DDP.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, environment, servers

from thalweg.examples.swin import launch_single_task, prepare
from thalweg.examples.swin.parser import parse_file

JOBS = Path(__file__).with_name("swin_jobs.py")
# 8 images per worker: two updates of two micro-batches each epoch.
SHORT = ("--nodes", "2", "--batch_size", "2", "--opts", "PRINT_FREQ", "1", "SAVE_FREQ", "1")
PAIRS = ("TRAIN.ACCUMULATION_STEPS", "2", "TRAIN.WARMUP_STEPS", "1", "AMP_LOSS_SCALE", "128")
LEVELS = {
    "O0": ("--amp_level=O0",),
    "O1": ("--amp_level=O1",),
    "O2": ("--amp_level=O2", "--kernel-opt"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    prepare.prepare(folder, classes=4, train=4, val=2, size=36, quiet=True)
    return folder


def launch(data: Path, output: Path, *arguments: str) -> int:
    """Runs the launcher; returns its exit code."""
    with servers() as nothing, pytest.MonkeyPatch.context() as patch:  # no process is left
        for name, value in environment(nothing.folder).items():
            patch.setenv(name, value)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(output))  # otherwise in TMPDIR
        where = ("--data", str(data), "--output", str(output))
        return launch_single_task.main([*where, *SHORT, *PAIRS, *arguments])


def trained(data: Path, output: Path, *arguments: str):
    """Trains; returns the log of the first node."""
    assert launch(data, output, *arguments) == 0
    (log,) = output.glob("*/*/seed0/0/log")
    assert (log.parents[1] / "1" / "log").is_file()
    return parse_file(log)


def trained_and_resumed(data: Path, tmp_path: Path, *arguments: str):
    """Trains two epochs, and the second one again; returns the first log.

    All that both have in common is the same.
    """
    arguments = ("TRAIN.EPOCHS", "2", *arguments)
    whole = trained(data, tmp_path / "whole", *arguments)
    (saved,) = (tmp_path / "whole").glob("*/*/seed0/checkpoint_1")
    rest = trained(data, tmp_path / "rest", "MODEL.RESUME", str(saved), *arguments)
    assert whole.column("step") == [1, 2, 3, 4]
    for name in ("step", "loss", "grad_norm", "lr", "loss_scale"):
        assert rest.column(name) == whole.column(name)[2:]
    assert rest.validation == whole.validation[1:]
    return whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "level",
    [pytest.param("O0", marks=pytest.mark.long), "O1", pytest.param("O2", marks=pytest.mark.long)],
)
def test_sharded_training_is_that_of_ddp_and_resumes_with_its_bits(data, tmp_path, level):
    sharded = trained_and_resumed(data, tmp_path, "--backend=fsdp", *LEVELS[level])
    ddp = trained(data, tmp_path / "ddp", "TRAIN.EPOCHS", "2", "--backend=ddp", *LEVELS[level])
    rounding = 1e-5 if level == "O0" else 0.02  # of float16
    assert sharded.column("loss") == pytest.approx(ddp.column("loss"), rel=rounding)
    assert sharded.column("grad_norm") == pytest.approx(ddp.column("grad_norm"), rel=5 * rounding)
    assert sharded.validation[-1]["top1"] == ddp.validation[-1]["top1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_training_with_the_optimizer_on_shards_is_that_of_ddp_and_resumes(data, tmp_path, level):
    served = trained_and_resumed(data, tmp_path, "--backend=ps", *LEVELS[level])
    ddp = trained(data, tmp_path / "ddp", "TRAIN.EPOCHS", "2", "--backend=ddp", *LEVELS[level])
    rounding = 1e-5 if level == "O0" else 0.02  # of float16
    assert served.column("loss") == pytest.approx(ddp.column("loss"), rel=rounding)
    assert served.column("grad_norm") == pytest.approx(ddp.column("grad_norm"), rel=5 * rounding)
    assert served.validation[-1]["top1"] == ddp.validation[-1]["top1"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["ddp", "thalweg"])
def test_training_of_two_nodes_on_one_machine_resumes_with_its_bits(data, tmp_path, backend):
    trained_and_resumed(data, tmp_path, f"--backend={backend}", *LEVELS["O1"])


def test_checkpoint_that_rank_0_does_not_find_ends_the_job(data, tmp_path, capfd):
    missing = ("MODEL.RESUME", str(tmp_path / "none"))
    assert launch(data, tmp_path / "out", *missing, "--backend=fsdp") != 0
    assert f"there is no {tmp_path}/none/" in capfd.readouterr().err


def test_infinite_gradient_in_the_shard_of_one_worker_skips_the_step_of_all(tmp_path):
    with servers() as cluster:
        results = Job("sharded", cluster, tmp_path, sidecar_of=[""] * 2, jobs=JOBS).results()
    assert [result.pop("finite") for result in results] == [False, True]
    assert results == [{"norm": "inf", "scale": 2.0**15, "kept": True}] * 2
