"""Tests what stands in for a gradient that the shards have."""

import gc
import weakref

import pytest
import torch
from torch import nn

from thalweg.ps._pushed_grad import PushedGrad


@pytest.fixture
def layer():
    """A layer whose weight's gradient is pushed in a step that is over, and whose bias has one."""
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.weight.grad = PushedGrad(layer.weight, "weight", set())
    layer.bias.grad = torch.ones_like(layer.bias)
    return layer


def _zero_with_the_optimizer(layer):
    torch.optim.SGD(layer.parameters()).zero_grad(set_to_none=False)


def _zero_with_the_optimizer_at_once(layer):
    torch.optim.SGD(layer.parameters(), foreach=True).zero_grad(set_to_none=False)


def _zero_with_the_module(layer):
    layer.zero_grad(set_to_none=False)


def _zero_by_hand(layer):
    for parameter in layer.parameters():
        parameter.grad.zero_()


ways = pytest.mark.parametrize(
    "zero",
    [
        _zero_with_the_optimizer,
        _zero_with_the_optimizer_at_once,
        _zero_with_the_module,
        _zero_by_hand,
    ],
)


@ways
def test_zeros_take_its_place_and_gradients_add_up_in_them(zero, layer):
    zero(layer)
    for parameter in layer.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    layer(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight))


@ways
def test_it_stays_and_says_so_until_its_step_is_over(zero, layer):
    unfinished = {id(layer.weight)}
    grad = layer.weight.grad = PushedGrad(layer.weight, "0.0", unfinished)
    with pytest.raises(RuntimeError, match=r"the gradient of 0\.0 has been pushed to the shards"):
        zero(layer)
    assert layer.weight.grad is grad
    unfinished.clear()
    zero(layer)
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


def test_zeroing_it_after_another_gradient_has_come_leaves_that_alone(layer):
    former = layer.weight.grad
    layer.weight.grad = torch.ones_like(layer.weight)
    former.zero_()
    assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight))


def test_nothing_else_changes_or_reads_it_after_its_step(layer):
    grad = layer.weight.grad
    for use in (grad.norm, lambda: grad.mul_(0), grad.share_memory_, lambda: grad + 1):
        with pytest.raises(RuntimeError, match="has been pushed to the shards"):
            use()
    assert layer.weight.grad is grad


def test_it_keeps_no_parameter_alive(layer):
    weight = weakref.ref(layer.weight)
    grad = layer.weight.grad
    layer.weight = None
    gc.collect()
    assert weight() is None
    with pytest.raises(RuntimeError, match="has been pushed to the shards"):
        grad.zero_()
