"""Tests what `thalweg bench optim` compares, and that wrong steps are refused."""

import json
from contextlib import nullcontext

import pytest
import torch
from amp_models import ROUNDOFF, casts_off_afterwards

from thalweg.cli import main
from thalweg_bench import optim_step
from thalweg_bench.mixed_sequence import MixedSequence
from thalweg_bench.optim_case import OptimCase
from thalweg_bench.rows import BenchError

SMALL = {"numel": 10_000, "repeats": 2}


@pytest.mark.parametrize(
    ("settings", "per_element", "name"),
    [
        ({"optimizer": "sgd"}, 20, "sgd fp32"),
        ({}, 28, "adamw fp32"),
        ({"param_dtype": "bf16"}, 22, "adamw bf16"),
        ({"optimizer": "adam", "param_dtype": "fp16"}, 22, "adam fp16"),
        ({"optimizer": "lamb"}, 44, "lamb fp32"),
        # Clipping reads gradients once more.
        ({"max_grad_norm": 0.5}, 32, "adamw fp32"),
        ({"max_grad_norm": 0.5, "param_dtype": "bf16"}, 24, "adamw bf16"),
        # Mixed precision moves gradients of half the width, and a copy of the parameters.
        ({"optimizer": "sgd", "opt_level": "O2"}, 22, "sgd O2"),
        ({"optimizer": "adam", "opt_level": "O2"}, 30, "adam O2"),
        ({"optimizer": "lamb", "opt_level": "O2"}, 42, "lamb O2"),
    ],
)
def test_bytes_are_the_least_that_a_step_can_move(settings, per_element, name):
    case = OptimCase(numel=1000, **settings)
    clipped = ", clipped to 0.5" if "max_grad_norm" in settings else ""
    assert case.bytes_moved == per_element * 1000
    assert case.name == f"{name}, 1,000 in 1 tensor{clipped}"


def test_bound_is_the_bytes_at_the_rate_of_the_fastest_triad():
    times = {"thalweg": [3.0, 4.0], "torch": [5.0, 5.0], "triad": [2.0, 1.0]}
    rows = {row.system: row for row in OptimCase(numel=1000).rows(times, 14_000)}
    assert rows["thalweg"].bound_s == rows["torch"].bound_s == 2.0
    assert rows["thalweg"].bytes == 28_000
    assert rows["triad"].bytes == 14_000
    assert rows["triad"].bound_s is None


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        *((optimizer, "") for optimizer in ("adamw", "adam", "sgd", "lamb")),
        *((optimizer, "--opt-level O2") for optimizer in ("adamw", "sgd", "lamb")),
        *((optimizer, "--max-grad-norm 0.1") for optimizer in ("adamw", "sgd")),
    ],
)
def test_rows_are_written_and_results_agree_with_the_peer(optimizer, more, tmp_path, capsys):
    file = tmp_path / "rows.json"
    arguments = f"--optimizer {optimizer} --numel 10000 --tensors 7 --repeats 3 --json {file}"
    with casts_off_afterwards() if "O2" in more else nullcontext():
        assert main(["bench", "optim", *arguments.split(), *more.split()]) == 0
    rows = json.loads(file.read_text())
    assert [row["system"] for row in rows] == ["thalweg", "torch", "triad"]
    assert "of bound" in capsys.readouterr().out


def test_masters_are_how_torch_keeps_moments_of_half_parameters_in_float32():
    case = OptimCase(param_dtype="bf16", numel=1000, tensors=2)
    theirs = optim_step.open_system(case, optim_step.MASTERS)
    start = [param.detach().clone() for param in theirs.params]
    theirs.step()
    ours = optim_step.open_system(case, "thalweg")
    ours.step()
    for param, master, begin in zip(ours.params, theirs.params, start, strict=True):
        assert master.dtype is torch.float32
        assert not torch.equal(master, begin)
        # There is a rounding to bfloat16 before the step, and one after it.
        bound = ROUNDOFF[torch.bfloat16] * (begin.abs() + param.abs()) + 1e-6
        assert ((param - master).abs() <= bound).all()


class WrongAdamW(torch.optim.AdamW):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, 2 * lr, weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("target", "wrong", "settings"),
    [
        ("thalweg.optim.FusedAdamW", WrongAdamW, {}),
        ("torch.nn.utils.clip_grad_norm_", lambda *_: None, {"max_grad_norm": 0.1}),
        (f"{MixedSequence.__module__}.MixedSequence.step", lambda _: None, {"opt_level": "O2"}),
    ],
)
def test_wrong_result_is_refused(target, wrong, settings, monkeypatch):
    monkeypatch.setattr(target, wrong)
    optimizer = "sgd" if settings else "adamw"
    with casts_off_afterwards(), pytest.raises(BenchError, match="tensor 0 differs from torch by"):
        OptimCase(optimizer=optimizer, **SMALL, **settings).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--numel 10 --tensors 11", "--tensors 11 is more than --numel 10"),
        ("--optimizer lamb --param-dtype bf16", "torch's side of lamb is in fp32 only"),
        ("--optimizer lamb --max-grad-norm 2", "lamb clips to 1 always"),
        ("--opt-level O2 --param-dtype bf16", "O2 has fp16 parameters"),
        ("--peers torch-masters", "fp32 parameters need no masters"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(["bench", "optim", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
