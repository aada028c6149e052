"""Steps that read gradients where backward has left them, and which ones do."""

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, network, setup
from deferred_cases import (
    IDS,
    KINDS,
    WAYS,
    bits,
    deferred,
    do_nothing,
    look,
    note_calls,
    open_apex,
    train_apex,
)
from torch import nn
from torch.nn import Parameter

from thalweg import amp
from thalweg.amp import _gradients
from thalweg.amp._masters import master_of
from thalweg.optim import FusedAdamW, FusedSGD, _plan


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


@pytest.fixture
def calls(monkeypatch):
    return note_calls(monkeypatch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_step_that_reads_the_model_has_the_bits_of_one_whose_gradients_were_made(
    way, kind, options, calls
):
    build, train = WAYS[way]
    results = []
    for before_step in (do_nothing, look):
        model, optimizer = build(kind, options)
        train(model, optimizer, range(1))  # makes the plan that later steps follow
        calls.clear()
        train(model, optimizer, range(1, 6), before_step)
        # Of four half-precision parameters, in five steps.
        assert [number for _, number in calls] == ([] if before_step is do_nothing else [4] * 5)
        results.append(bits(model, optimizer))
    assert len(results[0]) == len(results[1]) >= 12
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
@pytest.mark.parametrize(("kind", "options"), KINDS[-2:], ids=IDS[-2:])
def test_check_of_deferred_gradients_and_their_norm_are_one_sum(way, kind, options, monkeypatch):
    sums = []
    real = _plan.Plan.grad_squares
    monkeypatch.setattr(_plan.Plan, "grad_squares", lambda plan: sums.append(1) or real(plan))
    build, train = WAYS[way]
    model, optimizer = build(kind, options)
    train(model, optimizer, range(1))
    sums.clear()
    train(model, optimizer, range(1, 4))
    assert len(sums) == 3
    train(model, optimizer, range(4, 5), look)  # the step has other gradients than the check
    assert len(sums) == 5


def test_overflow_that_is_found_in_the_model_skips_the_step(calls):
    model, optimizer = deferred(FusedAdamW, loss_scale="dynamic")
    calls.clear()
    steps = [s["step"].item() for s in optimizer.state.values()]
    backward(model, optimizer, [float("inf"), 1.0])
    assert amp._amp_state.loss_scalers[0].loss_scale() == 64.0
    before = bits(model, optimizer)
    optimizer.step()
    assert [s["step"].item() for s in optimizer.state.values()] == steps == [1.0]
    for ours, expected in zip(bits(model, optimizer), before, strict=True):
        assert torch.equal(ours, expected)
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert [s["step"].item() for s in optimizer.state.values()] == [2.0]
    assert not calls


def test_step_that_was_skipped_has_no_norm():
    model = Exact()
    optimizer = FusedSGD(model.parameters(), lr=0.25, max_grad_norm=8.0)
    setup(model, optimizer, "O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    norms = []
    for inputs in ([3.0, 4.0], [3.0, 4.0], [float("inf"), 4.0], [3.0, 4.0]):
        optimizer.zero_grad()
        backward(model, optimizer, inputs)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert norms == [5.0, 5.0, None, 5.0]


def test_parameters_without_gradient_stay_and_are_rounded_into_the_model():
    model = nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    _, idle = amp.master_params(optimizer)
    for number in range(3):
        with torch.no_grad():
            idle.fill_(number + 0.1)
        optimizer.zero_grad()
        with amp.scale_loss(model[0](torch.tensor([1.0, 2.0])), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        expected = torch.full((2,), number + 0.1, dtype=torch.float16)
        assert torch.equal(model[1].weight, expected)
    assert model[0].weight.tolist() == [0.25, 0.5]


def test_two_optimizers_of_one_parameter_both_take_its_gradient():
    model = Exact()
    optimizers = [FusedSGD(model.parameters(), lr=lr) for lr in (0.25, 0.5)]
    setup(model, optimizers, "O2", loss_scale=128.0)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(model(torch.tensor([1.0, 1.0])), optimizers) as scaled:
            scaled.backward()
        gradients = [master_of(model.weight).weight.grad.clone()]
        optimizers[0].step()
        master_of(model.weight).weight.grad = gradients[0]  # a step clears what it has used
        optimizers[1].step()
    assert model.weight.tolist() == [1.0 - 3 * 0.75, 2.0 - 3 * 0.75]


@pytest.mark.parametrize("scale", [100.0, 0.5])
def test_scale_by_which_not_all_can_be_divided_is_not_left_to_the_step(scale, calls):
    model, optimizer = open_apex(FusedSGD, {"lr": 0.01}, loss_scale=scale)
    train_apex(model, optimizer, range(3))
    assert [number for _, number in calls] == [4] * 3


def test_who_clips_in_every_step_has_gradients_made_in_one_pass(calls):
    model, optimizer = open_apex(FusedSGD, {"lr": 0.01})
    train_apex(model, optimizer, range(11), look)
    once = ["gather_unscaled"] * _gradients._STEPS_WITHOUT_DEFERRAL
    expected = ["gather_unscaled", "gather_divided", *once, "gather_divided"]
    assert [name for name, _ in calls] == expected


def test_who_accumulates_in_every_step_has_nothing_deferred(calls):
    """Forward, which may have been compiled for ordinary parameters, comes between backwards."""
    model, optimizer = deferred()
    for number in range(3):
        calls.clear()
        types = []
        for _ in range(2):
            types.append(type(model.weight))
            backward(model, optimizer, [1.0, 1.0])
        optimizer.step()
        optimizer.zero_grad()
        assert len(calls) == 2
        # Before that it cannot be known.
        assert number == 0 or types == [Parameter] * 2
    assert model.weight.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_optimizer_without_masters_is_left_alone(level):
    model = network()
    optimizer = FusedSGD(model.parameters(), lr=0.01)
    setup(model, optimizer, level)
    train_apex(model, optimizer, range(2))
    assert {type(param) for param in model.parameters()} == {Parameter}
