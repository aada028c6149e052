"""Tests what `apex.parallel` has beside DistributedDataParallel: two processes over Gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gloo_workers import run_workers
from torch import nn

import thalweg
from thalweg.compat._apex_batch_norm import SyncBatchNorm, convert_syncbn_model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the results of both workers."""
    folder = tmp_path_factory.mktemp("store")
    return run_workers("apex_parallel_worker.py", 2, folder, timeout=90, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("order", ["first", "last"])
def test_statistics_and_gradients_are_those_of_all_workers_batches(results, order):
    for result in results:
        # Sums of 48 values in float32 and a dozen operations, relative to the largest value;
        # statistics of one worker alone would be off by a tenth.
        assert max(result[order]) < 200 * 2.0**-24


def test_synchronised_batch_normalisation_trains_under_ddp_on_the_cpu(results):
    for result in results:
        assert result["ddp"] < 200 * 2.0**-24


def test_one_worker_normalises_its_own_batch(lone_group):
    x = torch.randn(5, 4, 3)
    expected = nn.BatchNorm1d(4)(x)
    assert torch.equal(SyncBatchNorm(4)(x), expected)


def test_residual_is_added_before_the_clamp(results):
    for result in results:
        dtype, apart = result["fused"]
        assert dtype == "torch.float16"
        assert apart <= 3 * 2.0**-11 * 4  # roundings of sums below 4 in float16


def test_groups_share_statistics_among_their_workers_only(results):
    for result in results:
        size, whole, apart = result["groups"]
        assert (size, whole) == (1, None)
        assert apart < 200 * 2.0**-24


def test_reducer_shares_weights_and_averages_gradients_on_call(results):
    first, second = (result["reducer"] for result in results)
    assert first == second
    assert first[1:] == [[[1.5, 1.5]], [[0.5, 0.5], [1.0]]]


def test_conversion_keeps_parameters_and_leaves_instance_norm_alone():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(3)), nn.InstanceNorm1d(2))
    model.eval()
    weight = model[1][0].weight
    converted = convert_syncbn_model(model, channel_last=True)
    assert [type(m) for m in (converted[0], converted[1][0])] == [SyncBatchNorm] * 2
    assert isinstance(converted[2], nn.InstanceNorm1d)
    assert converted[1][0].weight is weight
    assert not converted[0].training
    x = torch.randn(2, 5, 4, 3)
    torch.testing.assert_close(
        converted[1][0](x), nn.BatchNorm2d(3).eval()(x.movedim(-1, 1)).movedim(1, -1)
    )


@pytest.mark.parametrize("module", ["thalweg.compat.multiproc", "apex.parallel.multiproc"])
def test_multiproc_starts_a_script_for_each_rank(module, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(*sys.argv[1:])\n")
    result = subprocess.run(
        [sys.executable, "-m", module, script, "--lr", "1", "--world-size", "2"],
        cwd=tmp_path,
        env=started_with_apex(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("--lr 1 --world-size 2 --rank 0\n", "")
    assert result.returncode == 0
    assert (tmp_path / "GPU_1.log").read_text() == "--lr 1 --world-size 2 --rank 1\n"


_WAITING = """
import os, signal
os.write(2, b"begun\\n")  # in one piece, unlike print()
signal.alarm(300)  # whatever happens, it does not stay behind
signal.pause()
"""


@pytest.mark.parametrize(
    ("failure", "code"), [("sys.exit(3)", 3), ("signal.raise_signal(signal.SIGKILL)", 137)]
)
def test_multiproc_ends_the_others_when_a_rank_fails(failure, code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import signal, sys\nif sys.argv[-1] == '1': {failure}\n{_WAITING}")
    result = subprocess.run(multiproc(script), cwd=tmp_path, timeout=120)
    assert result.returncode == code


def test_multiproc_ends_all_ranks_on_sigterm(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_WAITING)
    launcher = subprocess.Popen(multiproc(script), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert [launcher.stderr.readline() for _ in range(2)] == ["begun\n"] * 2
    launcher.terminate()
    assert not launcher.communicate(timeout=120)[1]  # it ends when no rank has it open
    assert launcher.returncode == 143


@pytest.mark.parametrize("size", [["abc"], [], ["0"], ["-2"]])
def test_multiproc_refuses_a_wrong_number_of_ranks(size, tmp_path):
    command = [sys.executable, "-m", "thalweg.compat.multiproc", "script.py", "--world-size", *size]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: python -m thalweg.compat.multiproc SCRIPT.py")
    assert result.stderr.endswith("--world-size takes the number of processes\n")


def multiproc(script):
    return [sys.executable, "-m", "thalweg.compat.multiproc", script, "--world-size", "2"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("from apex import amp; import torch; print(amp.initialize.__module__)", "thalweg.amp"),
        ("import amp_C; print(amp_C.multi_tensor_sgd.__module__)", "thalweg.compat"),
        ("import sys; print('torch' in sys.modules)", "False"),
    ],
)
def test_apex_may_be_imported_before_torch(script, said, tmp_path):
    (tmp_path / "apex").mkdir()  # a folder of this name is no apex
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=started_with_apex(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said in result.stdout
    assert not result.stderr


def started_with_apex(folder):
    """Returns an environment whose Python runs thalweg_apex.pth, installed or not."""
    source = Path(thalweg.__file__).parents[1]
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(source)!r})\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "THALWEG_COMPAT": "apex"}
    return environment | {"PYTHONPATH": str(folder)}
