"""Runs torch's own inventory of optimizer arguments, valid and invalid, on the fused optimizers."""

import sys
import types
import unittest

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD

# The wheel has the inventory, but not this package, of which it needs one name at import.
if "expecttest" not in sys.modules:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in
from torch.testing._internal.common_optimizers import optim_db

FUSED = {torch.optim.Adam: FusedAdam, torch.optim.AdamW: FusedAdamW, torch.optim.SGD: FusedSGD}
INFOS = [info for info in optim_db if info.optim_cls in FUSED]
INPUTS = [
    pytest.param(info.optim_cls, case.kwargs, id=f"{info.optim_cls.__name__}-{case.desc}")
    for info in INFOS
    for case in info.optim_inputs_func(device="cpu")
]
ERRORS = [
    pytest.param(info.optim_cls, error, id=f"{info.optim_cls.__name__}-{index}")
    for info in INFOS
    for index, error in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
]


def test_the_inventory_has_all_three():
    assert {info.optim_cls for info in INFOS} == set(FUSED)


@pytest.mark.parametrize(("kind", "options"), INPUTS)
def test_right_arguments_give_what_torch_gives(kind, options):
    options = {k: v for k, v in options.items() if k not in ("foreach", "capturable")}
    params = make_params()
    reference = copy_of(params, torch.float64)
    ours, theirs = FUSED[kind](params, **options), kind(reference, foreach=False, **options)
    for step in range(10):
        set_grads(step, params, reference)
        ours.step()
        theirs.step()
    lr = float(ours.param_groups[0]["lr"]) * (50 if kind is torch.optim.SGD else 1)
    size = max(p.abs().max().item() for p in reference if p.numel())
    assert distance(params, reference) <= bound(10, lr, size)


@pytest.mark.parametrize(("kind", "error"), ERRORS)
def test_wrong_arguments_raise_what_torch_raises(kind, error):
    case = error.optimizer_error_input
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type):
            FUSED[kind](case.params, **case.kwargs)
        return
    with pytest.raises(error.error_type):
        FUSED[kind](case.params, **case.kwargs)


@pytest.mark.parametrize(("kind", "options"), INPUTS)
def test_steps_without_gradients_or_parameters_are_nothing(kind, options):
    options = {k: v for k, v in options.items() if k not in ("foreach", "capturable")}
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = FUSED[kind](params, **options)
    optimizer.step()
    assert not optimizer.state
    for param in params:
        param.grad = torch.zeros_like(param)
    if not any(group["weight_decay"] for group in optimizer.param_groups):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("fused", [FusedAdam, FusedAdamW])
def test_step_of_old_checkpoints_is_a_plain_number(fused):
    params, others = make_params(), make_params()
    optimizer, resumed = fused(params), fused(others)
    for step in range(2):
        if step == 1:
            saved = optimizer.state_dict()
            for state in saved["state"].values():
                state["step"] = int(state["step"])
            resumed.load_state_dict(saved)
            with torch.no_grad():
                for param, other in zip(params, others, strict=True):
                    other.copy_(param)
        set_grads(step, params, others)
        optimizer.step()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert {float(state["step"]) for state in resumed.state.values()} == {2.0}


@pytest.mark.parametrize("kind", FUSED)
def test_types_may_be_mixed_in_a_group_under_any_default_type(kind):
    types = (torch.float32, torch.bfloat16, torch.float16)
    params = [make_params(dtype, seed)[4] for seed, dtype in enumerate(types)]
    alone = [copy_of([param]) for param in params]
    torch.set_default_dtype(torch.float64)
    try:
        together = FUSED[kind](params, lr=1e-2)
        separate = [FUSED[kind](single, lr=1e-2) for single in alone]
        for param, (single,) in zip(params, alone, strict=True):
            set_grads(1, [param], [single])
        for optimizer in (together, *separate):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, (b,) in zip(params, alone, strict=True))
