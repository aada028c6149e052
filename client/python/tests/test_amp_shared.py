"""Tests parameters that several optimizers update under mixed precision, beside plain torch."""

import gc

import pytest
import torch
from amp_models import Exact, casts_off_afterwards, setup
from torch import optim

import thalweg.compat  # noqa: F401 - gives torch the names
from thalweg import amp
from thalweg.optim import FusedSGD

RATES = (0.25, 0.5)


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def made(kind):
    """Returns an Exact and two optimizers of its weight."""
    model = Exact()
    return model, [kind(model.parameters(), lr=lr) for lr in RATES]


def trained_by_torch(steps, *, clears):
    """Returns the weight after `steps` of plain torch, each with the gradient 1."""
    model, optimizers = made(optim.SGD)
    for _ in range(steps):
        if clears:
            model.zero_grad()
        model(torch.tensor([1.0, 1.0])).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.weight.tolist()


def backward(model, optimizers, loss_id=0, inputs=(1.0, 1.0), **options):
    loss = model(torch.tensor(inputs))
    with amp.scale_loss(loss, optimizers, loss_id=loss_id, **options) as scaled:
        scaled.backward()


def clear(which, model, optimizers):
    for one in {"model": [model], "first": optimizers[:1], "all": optimizers}[which]:
        one.zero_grad()


@pytest.mark.parametrize("kind", [optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("which", ["model", "first", "all"])
def test_steps_of_all_optimizers_take_a_shared_gradient(kind, level, which):
    model, optimizers = made(kind)
    setup(model, optimizers, level, loss_scale=128.0)
    for _ in range(3):
        clear(which, model, optimizers)
        backward(model, optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert model.weight.tolist() == trained_by_torch(3, clears=True) == [-1.25, -0.25]


def test_gradient_that_only_one_optimizer_has_used_is_not_added_to_the_next():
    model, optimizers = made(optim.SGD)
    setup(model, optimizers, "O2", loss_scale=128.0)
    for _ in range(3):
        model.zero_grad()
        backward(model, optimizers)
        optimizers[0].step()
    assert model.weight.tolist() == [0.25, 1.25]


def test_gradient_of_a_master_with_one_optimizer_is_gone_after_the_step():
    model, optimizers = made(optim.SGD)
    setup(model, optimizers, "O2", loss_scale=128.0)
    setup([], optimizers[1], "O0")
    backward(model, optimizers[0])
    optimizers[0].step()
    (master,) = amp.master_params(optimizers[0])
    assert master.grad is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_of_a_shared_gradient_skips_the_steps_of_all(level):
    model, optimizers = made(optim.SGD)
    setup(model, optimizers, level)
    for inputs in ((float("inf"), 1.0), (1.0, 1.0)):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
        model.zero_grad()
        backward(model, optimizers, inputs=inputs)
        for optimizer in optimizers:
            optimizer.step()
    assert model.weight.tolist() == trained_by_torch(1, clears=True)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_losses_of_different_scales_accumulate_in_a_shared_gradient(level):
    model, optimizers = made(optim.SGD)
    setup(model, optimizers, level, num_losses=2)
    scales = {f"loss_scaler{i}": {"loss_scale": s, "unskipped": 0} for i, s in enumerate((8, 64))}
    amp.load_state_dict(scales)
    backward(model, optimizers, delay_unscale=True)
    backward(model, optimizers, loss_id=1)
    (param,) = amp.master_params(optimizers[0])
    assert param.grad.tolist() == [2.0, 2.0]


def test_shared_gradient_that_a_backward_does_not_reach_is_not_divided_again():
    reached, left = Exact(), Exact()
    params = [*reached.parameters(), *left.parameters()]
    optimizers = [optim.SGD(params, lr=1.0), optim.SGD(left.parameters(), lr=1.0)]
    setup([reached, left], optimizers, "O1", loss_scale=128.0)
    for model in (left, reached):
        backward(model, optimizers, inputs=(1.0, 2.0))
    assert [param.grad.tolist() for param in params] == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("unscales_first", [False, True])
def test_steps_of_all_optimizers_take_a_shared_gradient_under_gradscaler(unscales_first):
    model, optimizers = made(optim.SGD)
    torch.cuda.amp.aiak_amp_decorate(model, optimizers)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        model.zero_grad()
        scaler.scale(model(torch.tensor([1.0, 1.0])) / 2**4).backward()
        if unscales_first:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    moved = 3 * sum(RATES) / 2**4
    assert model.weight.tolist() == [1.0 - moved, 2.0 - moved]


def test_gradient_of_an_earlier_step_does_not_wait_for_an_optimizer_that_is_gone():
    model, optimizers = made(optim.SGD)
    setup(model, optimizers, "O2", loss_scale=128.0)
    optimizers.pop()
    gc.collect()
    for _ in range(2):
        model.zero_grad()
        backward(model, optimizers)
        optimizers[0].step()
    assert model.weight.tolist() == [0.5, 1.5]
