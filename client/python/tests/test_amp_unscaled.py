"""Tests that no step leaves out gradients of backward passes outside of scale_loss."""

import contextlib

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, exact, network, setup, train
from torch import nn, optim

from thalweg import amp

REFUSED = "gradients that no scale_loss"


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def run_plainly(model, inputs=(1.0, 2.0)):
    model(torch.tensor(inputs)).backward()


def clear(how, model, optimizer):
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "optimizer, to zeros":
        optimizer.zero_grad(set_to_none=False)
    else:
        model.zero_grad(set_to_none=how == "model")


CLEARS = ["optimizer", "optimizer, to zeros", "model", "model, to zeros"]


@pytest.mark.parametrize("how", CLEARS)
def test_backward_without_scale_after_steps_with_one_is_refused(how):
    model, optimizer = exact()
    for _ in range(2):
        clear(how, model, optimizer)
        backward(model, optimizer, [0.0, 0.0])
        optimizer.step()
    clear(how, model, optimizer)
    run_plainly(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    clear(how, model, optimizer)
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_second_loss_without_scale_is_refused():
    model, optimizer = exact()
    backward(model, optimizer, [1.0, 2.0])
    run_plainly(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()


def test_backward_without_scale_between_delayed_ones_is_refused():
    model, optimizer = exact()
    backward(model, optimizer, [1.0, 2.0], delay_unscale=True)
    run_plainly(model)
    backward(model, optimizer, [1.0, 2.0])
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()


def test_model_with_float32_layers_is_not_trained_by_halves():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    setup(model, optimizer, "O2", half_dtype=torch.bfloat16)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.randn(4, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_parameter_that_is_thawed_later_is_watched_from_the_next_backward_on():
    model = nn.ModuleList([Exact(), Exact()])
    model[1].weight.requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    backward(model[0], optimizer, [1.0, 2.0])
    model[1].weight.requires_grad_(True)
    backward(model[0], optimizer, [1.0, 2.0])
    run_plainly(model[1])
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()


@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize("when", ["before backward", "after step"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_accumulation_as_in_scripts_for_apex_is_not_refused(how, when, delay, overflow):
    model, optimizer = exact(loss_scale="dynamic")
    for number in range(3):
        if when == "before backward":
            clear(how, model, optimizer)
        for is_last in (False, True):
            inputs = [torch.inf if overflow and number == 1 else 1.0, 0.0]
            backward(model, optimizer, inputs, delay_unscale=delay and not is_last)
        optimizer.step()
        if when == "after step":
            clear(how, model, optimizer)
    assert model.weight.tolist() == [1.0 - (2 if overflow else 3) * 0.5, 2.0]


def test_model_that_is_cleared_between_backward_and_step_is_not_refused():
    model, optimizer = exact()
    for set_to_none in (True, False):
        backward(model, optimizer, [1.0, 0.0])
        model.zero_grad(set_to_none)
        optimizer.step()
    assert model.weight.tolist() == [0.5, 2.0]


def test_backward_without_scale_that_is_cleared_before_the_step_is_not_refused():
    model, optimizer = exact()
    backward(model, optimizer, [1.0, 0.0])
    run_plainly(model)
    model.zero_grad(set_to_none=False)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 2.0]


def test_clipping_gradients_of_the_model_is_not_refused():
    model, optimizer = exact()
    backward(model, optimizer, [1.0, 0.0])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 2.0]


def test_gradients_that_another_optimizers_loss_leaves_are_not_refused():
    model, other = Exact(), Exact()
    optimizer, others = (optim.SGD(m.parameters(), lr=0.25) for m in (model, other))
    setup([model, other], [optimizer, others], "O2", loss_scale=128.0)
    backward(model, optimizer, [1.0, 0.0])
    inputs = torch.tensor([1.0, 1.0])
    with amp.scale_loss(model(inputs) + other(inputs), others) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 2.0]


def test_scaled_backward_that_fails_leaves_the_next_plain_one_refused():
    model, optimizer = exact()
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(torch.zeros(()), optimizer):
        raise ZeroDivisionError
    run_plainly(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
