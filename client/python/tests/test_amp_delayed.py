"""Tests scales of several losses whose gradients are divided together, after `delay_unscale`."""

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, exact, setup

from thalweg import amp

LEVELS = ["O1", "O2"]


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def scales():
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


def counts():
    return [scaler.unskipped for scaler in amp._amp_state.loss_scalers]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overflows", [0, 1])
def test_overflow_of_either_loss_lowers_both_scales(level, overflows):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=3)
    for number in range(2):
        inputs = [torch.inf if number == overflows else 1.0, 1.0]
        backward(model, optimizer, inputs, loss_id=number, delay_unscale=number == 0)
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    assert scales() == [64.0, 64.0, 128.0]


@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_on_where_only_the_delayed_loss_needs_a_lower_scale(level):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=2)
    amp._amp_state.loss_scalers[0].load_state_dict({"loss_scale": 2.0**20, "unskipped": 0})
    # Gradients of 2**16 overflow in half precision; the sum of both is finite at a scale of 2**13.
    for _ in range(10):
        optimizer.zero_grad()
        with amp.scale_loss(
            (model.weight.half() * 4).sum(), optimizer, loss_id=0, delay_unscale=True
        ) as scaled:
            scaled.backward()
        with amp.scale_loss(model.weight.half().sum(), optimizer, loss_id=1) as scaled:
            scaled.backward()
        optimizer.step()
    assert model.weight[0] < 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_finite_update_counts_for_all_losses_and_for_each_once(level):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=3)
    for loss_id in (0, 1, 0):
        backward(model, optimizer, [1.0, 1.0], loss_id=loss_id, delay_unscale=True)
    backward(model, optimizer, [1.0, 1.0], loss_id=1)
    assert counts() == [1, 1, 0]
    optimizer.step()
    backward(model, optimizer, [1.0, 1.0], loss_id=1)
    assert counts() == [1, 2, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_noticed_late_lowers_the_scale_of_the_delayed_loss(level):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=2)
    backward(model, optimizer, [torch.inf, 1.0], loss_id=0, delay_unscale=True)
    backward(model, optimizer, [1.0, 1.0], loss_id=1, delay_overflow_check=True)
    backward(model, optimizer, [1.0, 1.0], loss_id=1)
    assert scales() == [64.0, 64.0]


def of_two_optimizers(level):
    """Returns two models with an optimizer each; loss 0 is of both, and delayed."""
    models = [Exact(), Exact()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25) for model in models]
    setup(models, optimizers, level, loss_scale="dynamic", num_losses=3)
    for scaler in amp._amp_state.loss_scalers:
        scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 0})
    return models, optimizers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("inputs", "scale", "count"),
    [
        ((1.0, 1.0), 128.0, 1),
        ((torch.inf, 1.0), 64.0, 0),
        ((1.0, torch.inf), 64.0, 0),
        ((torch.inf, torch.inf), 64.0, 0),
    ],
)
def test_delayed_loss_of_two_optimizers_is_updated_once(level, inputs, scale, count):
    models, optimizers = of_two_optimizers(level)
    loss = sum(model(torch.tensor([x, 1.0])) for model, x in zip(models, inputs, strict=True))
    with amp.scale_loss(loss, optimizers, loss_id=0, delay_unscale=True) as scaled:
        scaled.backward()
    for number in range(2):
        backward(models[number], optimizers[number], [1.0, 1.0], loss_id=number + 1)
    assert (scales()[0], counts()[0]) == (scale, count)
    for number in range(2):
        assert scales()[number + 1] == (64.0 if inputs[number] == torch.inf else 128.0)


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_loss_whose_gradients_are_cleared_has_no_part_in_the_next_overflow(level):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=2)
    backward(model, optimizer, [1.0, 1.0], loss_id=0, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, [torch.inf, 1.0], loss_id=1)
    assert scales() == [128.0, 64.0]
