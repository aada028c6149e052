"""Tests O2 with torch's own optimizers, which only the environment makes run fused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from amp_models import script_environment

SCRIPT = """
import json, sys
import torch
from amp_models import loss_of, network, setup
import thalweg.compat
from thalweg import amp
from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD, fallbacks, fused_steps

KINDS = {
    "Adam": (torch.optim.Adam, FusedAdam, {"lr": 0.01, "eps": 1e-3}),
    "AdamW": (torch.optim.AdamW, FusedAdamW, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "SGD": (torch.optim.SGD, FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}
OVERFLOW = 2

def with_amp(kind, options):
    model = network()
    optimizer = kind(model.parameters(), **options)
    setup(model, optimizer, "O2")
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("inf") if step == OVERFLOW else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
    return model, optimizer

def with_aiak(kind, options):
    model = network()
    model, optimizer = torch.cuda.amp.aiak_amp_decorate(
        model, kind(model.parameters(), **options))
    scaler = torch.amp.GradScaler("cpu")
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == OVERFLOW else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(torch.cuda.amp.aiak_amp_parameters(optimizer), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer

def result(flow, kind, options):
    model, optimizer = flow(kind, options)
    masters = list(amp.master_params(optimizer))
    assert any(p.dtype is torch.float16 for p in model.parameters())
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))
    return [x for master in masters for x in master.view(-1).tolist()]

results = {}
for name, (theirs, ours, options) in KINDS.items():
    for flow in (with_amp, with_aiak):
        results[f"{name} {flow.__name__}"] = [result(flow, k, options) for k in (theirs, ours)]
print(json.dumps({"results": results, "fused": fused_steps, "fallbacks": fallbacks}))
"""


def run(**variables: str):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=script_environment() | {"PYTHONPATH": str(Path(__file__).parent)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def switched():
    return run(AIAK_FUSED_OPTIMIZER="1")


def test_masters_have_the_bits_of_the_fused_optimizer_used_by_hand(switched):
    for name, (theirs, ours) in switched["results"].items():
        assert theirs == ours, name


def test_all_steps_run_fused(switched):
    assert set(switched["fused"]) == {"Adam", "AdamW", "SGD"}
    assert switched["fallbacks"] == {}


def test_training_is_that_without_the_switch(switched):
    plain = run()
    assert plain["fused"] == {}
    for name, (theirs, ours) in plain["results"].items():
        assert ours == switched["results"][name][1]
        # A parameter that is rounded to the other neighbour changes gradients by some 2⁻¹¹ of
        # themselves; five steps of 0.01, or 0.05 times clipped gradients, move by that much less.
        worst = max(abs(a - b) for a, b in zip(theirs, switched["results"][name][0], strict=True))
        assert worst <= 2e-4, name
