import json

import pytest
import torch
from amp_models import ROUNDOFF, casts_off_afterwards

from thalweg.cli import main
from thalweg_bench import optim_case
from thalweg_bench.mixed_sequence import MixedSequence
from thalweg_bench.optim_case import OptimCase
from thalweg_bench.rows import BenchError


@pytest.mark.parametrize(
    ("optimizer", "dtype", "per_element"),
    [
        ("sgd", "fp32", 20),
        ("adamw", "fp32", 28),
        ("adamw", "bf16", 22),
        ("adam", "fp16", 22),
        ("lamb", "fp32", 44),
    ],
)
def test_bytes_are_the_least_that_a_step_can_move(optimizer, dtype, per_element):
    case = OptimCase(optimizer, dtype, 1000, 1, (), 1)
    assert case.bytes_moved == per_element * 1000


@pytest.mark.parametrize(("dtype", "per_element"), [("fp32", 32), ("bf16", 24)])
def test_clipping_reads_gradients_once_more(dtype, per_element):
    case = OptimCase("adamw", dtype, 1000, 1, (), 1, max_grad_norm=0.5)
    assert case.bytes_moved == per_element * 1000
    assert case.name == f"adamw {dtype}, 1,000 in 1 tensor, clipped to 0.5"


@pytest.mark.parametrize(("optimizer", "per_element"), [("sgd", 22), ("adam", 30), ("lamb", 42)])
def test_mixed_precision_moves_half_gradients_and_a_half_copy(optimizer, per_element):
    case = OptimCase(optimizer, "fp32", 1000, 1, (), 1, mixed=True)
    assert case.bytes_moved == per_element * 1000
    assert case.name == f"{optimizer} O2, 1,000 in 1 tensor"


def test_bound_is_the_bytes_at_the_rate_of_the_fastest_triad():
    case = OptimCase("adamw", "fp32", 1000, 1, ("torch",), 2)
    times = {"thalweg": [3.0, 4.0], "torch": [5.0, 5.0], "triad": [2.0, 1.0]}
    rows = {row.system: row for row in optim_case.make_rows(case, times, 14_000)}
    assert rows["thalweg"].bound_s == rows["torch"].bound_s == 2.0
    assert rows["thalweg"].bytes == 28_000
    assert rows["triad"].bytes == 14_000
    assert rows["triad"].bound_s is None


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "lamb"])
def test_rows_are_written_and_results_agree_with_the_peer(optimizer, tmp_path, capsys):
    file = tmp_path / "rows.json"
    arguments = f"--optimizer {optimizer} --numel 10000 --tensors 7 --repeats 3 --json {file}"
    assert main(["bench", "optim", *arguments.split()]) == 0
    rows = json.loads(file.read_text())
    assert [row["system"] for row in rows] == ["thalweg", "torch", "triad"]
    assert rows[0]["case"] == f"{optimizer} fp32, 10,000 in 7 tensors"
    assert "of bound" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_steps_on_a_gpu_agree_with_the_peer(optimizer, tmp_path):
    file = tmp_path / "rows.json"
    arguments = f"--optimizer {optimizer} --device cuda:0 --numel 10000 --tensors 7 --json {file}"
    assert main(["bench", "optim", *arguments.split()]) == 0
    rows = json.loads(file.read_text())
    assert [row["system"] for row in rows] == ["thalweg", "torch", "triad"]
    assert rows[0]["case"] == f"{optimizer} fp32, 10,000 in 7 tensors on cuda:0"


def test_parameters_and_triad_are_on_the_device():
    """`meta` is a device that computes nothing."""
    case = OptimCase("adamw", "fp32", 1000, 2, (), 1, "meta")
    [param, _] = optim_case._open(case, "thalweg").params
    assert param.device.type == param.grad.device.type == "meta"
    assert optim_case._Triad(1, torch.device("meta"))._a.device.type == "meta"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_clipped_results_agree_with_the_peers(optimizer, tmp_path):
    file = tmp_path / "rows.json"
    arguments = f"--optimizer {optimizer} --numel 10000 --tensors 7 --repeats 3 --json {file}"
    clipping = "--max-grad-norm 0.1 --peers torch,torch-foreach"
    assert main(["bench", "optim", *arguments.split(), *clipping.split()]) == 0
    assert {row["bytes"] for row in json.loads(file.read_text())[:3]} == {
        10_000 * (32 if optimizer == "adamw" else 24)
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_masters_agree_with_those_of_the_sequence(optimizer, tmp_path):
    file = tmp_path / "rows.json"
    arguments = f"--optimizer {optimizer} --numel 10000 --tensors 7 --repeats 3 --json {file}"
    with casts_off_afterwards():
        assert main(["bench", "optim", *arguments.split(), "--opt-level", "O2"]) == 0
    assert json.loads(file.read_text())[0]["case"] == f"{optimizer} O2, 10,000 in 7 tensors"


def test_masters_are_how_torch_keeps_moments_of_half_parameters_in_float32():
    case = OptimCase("adamw", "bf16", 1000, 2, (), 1)
    theirs = optim_case._open(case, optim_case.MASTERS)
    start = [param.detach().clone() for param in theirs.params]
    theirs.step()
    ours = optim_case._open(case, "thalweg")
    ours.step()
    for param, master, begin in zip(ours.params, theirs.params, start, strict=True):
        assert master.dtype is torch.float32
        assert not torch.equal(master, begin)
        # There is a rounding to bfloat16 before the step, and one after it.
        bound = ROUNDOFF[torch.bfloat16] * (begin.abs() + param.abs()) + 1e-6
        assert ((param - master).abs() <= bound).all()


def test_mixed_step_that_is_left_out_is_refused(monkeypatch):
    monkeypatch.setattr(MixedSequence, "step", lambda _: None)
    with casts_off_afterwards(), pytest.raises(BenchError, match="tensor 0 differs from torch by"):
        optim_case.run(OptimCase("sgd", "fp32", 10_000, 1, ("torch",), 2, mixed=True))


def test_clipping_that_one_side_leaves_out_is_refused(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    with pytest.raises(BenchError, match="tensor 0 differs from torch by"):
        optim_case.run(OptimCase("sgd", "fp32", 10_000, 1, ("torch",), 2, max_grad_norm=0.1))


def test_wrong_result_is_refused(monkeypatch):
    class Wrong(torch.optim.AdamW):
        def __init__(self, params, lr, weight_decay):
            super().__init__(params, 2 * lr, weight_decay=weight_decay)

    monkeypatch.setattr("thalweg.optim.FusedAdamW", Wrong)
    with pytest.raises(BenchError, match="tensor 0 differs from torch by"):
        optim_case.run(OptimCase("adamw", "fp32", 1000, 1, ("torch",), 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--numel 10 --tensors 11", "--tensors 11 is more than --numel 10"),
        ("--optimizer lamb --param-dtype bf16", "torch's side of lamb is in fp32 only"),
        ("--device meta", "--device meta is not known: give cpu, cuda or cuda:N"),
        ("--device cuda:99", "--device cuda:99 cannot be used: "),
        ("--device gpu", "--device gpu cannot be used: "),
        ("--optimizer lamb --max-grad-norm 2", "lamb clips to 1 always"),
        ("--opt-level O2 --param-dtype bf16", "O2 has fp16 parameters"),
        ("--peers torch-masters", "fp32 parameters need no masters"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(["bench", "optim", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
