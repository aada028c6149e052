"""Tests training loops that catch an exception in a scaled backward and go on."""

import contextlib

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, setup
from torch import nn, optim

from thalweg import amp

LEVELS = ["O1", "O2"]  # gradients of float32 parameters, and of masters


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


class Caught(Exception):
    """Stands for an out-of-memory that the training loop catches."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, inputs):
        return inputs.clone()

    @staticmethod
    def backward(*_):
        raise Caught


class HalfOfIt(nn.Module):
    """A model of two parameters, whose backward may fail after the first has its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))

    def forward(self, inputs, fail=False):
        # Autograd runs what was created last first.
        second = FailInBackward.apply(self.second) if fail else self.second
        return (second * inputs).sum().float() + (self.first * inputs).sum().float()


def scaled_training(level):
    """An SGD with rate 0.25 of a HalfOfIt, under a scale of 128."""
    model = HalfOfIt()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    setup(model, optimizer, level, loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    return model, optimizer


def run_backward(model, optimizer, inputs, *, fail=False, **options):
    with contextlib.suppress(Caught):
        loss = model(torch.tensor(inputs), fail)
        with amp.scale_loss(loss, optimizer, **options) as scaled:
            scaled.backward()


def steps_of_torch(backwards):
    """Returns the weights after one step of plain torch in which these backwards accumulate."""
    model = HalfOfIt()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    for inputs, fail in backwards:
        with contextlib.suppress(Caught):
            model(torch.tensor(inputs), fail).backward()
    optimizer.step()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_goes_on_after_a_context_that_raised(level):
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    setup(model, optimizer, level, loss_scale=128.0)
    backward(model, optimizer, [1.0, 2.0], delay_unscale=True)
    with pytest.raises(Caught), amp.scale_loss(torch.zeros(()), optimizer, delay_unscale=True):
        raise Caught
    backward(model, optimizer, [2.0, 2.0])
    (param,) = amp.master_params(optimizer)
    assert param.grad.tolist() == [3.0, 4.0]
    optimizer.step()
    assert model.weight.tolist() == [0.25, 1.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_step_refuses_gradients_that_a_failed_context_left_scaled(level, delay):
    model, optimizer = scaled_training(level)
    run_backward(model, optimizer, [1.0, 2.0], delay_unscale=True)
    run_backward(model, optimizer, [2.0, 2.0], fail=True, delay_unscale=delay)
    with pytest.raises(RuntimeError, match="still multiplied by the loss scale"):
        optimizer.step()
    optimizer.zero_grad()
    run_backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert [p.tolist() for p in model.parameters()] == [[0.75, 1.5]] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_backward_that_failed_halfway_adds_what_it_adds_in_torch(level):
    model, optimizer = scaled_training(level)
    backwards = [([1.0, 2.0], False), ([2.0, 2.0], True), ([1.0, 1.0], False)]
    for number, (inputs, fail) in enumerate(backwards):
        run_backward(model, optimizer, inputs, fail=fail, delay_unscale=number < 2)
    optimizer.step()
    assert [p.tolist() for p in model.parameters()] == steps_of_torch(backwards)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("earlier", [False, True])
def test_backward_that_failed_halfway_adds_nothing(level, earlier):
    model, optimizer = scaled_training(level)
    if earlier:
        run_backward(model, optimizer, [1.0, 2.0])
    before = [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]
    run_backward(model, optimizer, [2.0, 2.0], fail=True)
    after = [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]
    assert after == before == ([[1.0, 2.0]] * 2 if earlier else [None] * 2)
    run_backward(model, optimizer, [1.0, 1.0])
    optimizer.step()
    successes = [([1.0, 2.0], False)] * earlier + [([1.0, 1.0], False)]
    assert [p.tolist() for p in model.parameters()] == steps_of_torch(successes)


@pytest.mark.parametrize("updates", [False, True])
def test_backward_of_fp16_optimizer_that_failed_leaves_float32_gradients_as_torch_does(updates):
    model = HalfOfIt()
    optimizer = amp.FP16_Optimizer(optim.SGD(model.parameters(), lr=0.25), 128.0, verbose=False)
    backwards = [([1.0, 2.0], False), ([2.0, 2.0], True), ([1.0, 1.0], False)]
    for inputs, fail in backwards:
        with contextlib.suppress(Caught):
            optimizer.backward(model(torch.tensor(inputs), fail), update_master_grads=updates)
        if fail and updates:
            assert model.second.grad.tolist() == [1.0, 2.0]
    optimizer.update_master_grads()
    optimizer.step()
    assert [p.tolist() for p in model.parameters()] == steps_of_torch(backwards)
