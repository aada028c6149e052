"""Gradients of a half model on their way to the masters: one pass, and what it stands for."""

import pytest
import torch

from thalweg import amp
from thalweg.amp._scaling import LossScaler, gather, gather_unscaled, unscale

CPU = torch.device("cpu")


def some_grads(dtype):
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(shape, generator=generator) for shape in ((), (0,), (33, 5), (4099, 3))]
    image = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return [grad.to(dtype) for grad in (*made, made[3].t(), made[3][::2, 1:], image)]


def in_two_passes(grads, scaler):
    gathered = gather(grads)
    unscale(gathered, scaler)
    return gathered


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss_scale", ["dynamic", 3.0])
def test_one_pass_gives_the_bits_of_two(dtype, loss_scale):
    grads = some_grads(dtype)
    before = [grad.clone() for grad in grads]
    scaler, other = LossScaler(loss_scale), LossScaler(loss_scale)
    for ours, theirs in zip(
        gather_unscaled(grads, scaler), in_two_passes(grads, other), strict=True
    ):
        assert ours.dtype is torch.float32
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    assert all(map(torch.equal, grads, before))
    assert scaler.found_inf(CPU) == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_found_under_a_dynamic_scale_only(bad):
    for loss_scale, found in (("dynamic", 1), (4.0, 0)):
        grads = some_grads(torch.float16)
        grads[3][4000, 2] = bad
        scaler = LossScaler(loss_scale)
        gathered = gather_unscaled(grads, scaler)
        assert scaler.found_inf(CPU) == found
        assert not gathered[3][4000, 2].isfinite()


def test_sparse_gradients_take_two_passes():
    scaler = LossScaler(2.0)
    sparse = torch.eye(3, dtype=torch.float16).to_sparse()
    gathered = gather_unscaled([*some_grads(torch.float16), sparse], scaler)
    assert torch.equal(gathered[-1].to_dense(), torch.eye(3) / 2)


GRADIENT = 2.0**-10  # times the scale of 2^16 that O2 starts with, it is finite in fp16


def small_loss(param):
    return param.float().sum() * GRADIENT


def mixed_step(param, optimizer):
    """Does a backward and a step; returns where the master's gradient lay in between."""
    with amp.scale_loss(small_loss(param), optimizer) as loss:
        loss.backward()
    (master,) = amp.master_params(optimizer)
    place = master.grad.data_ptr()
    optimizer.step()
    return place


@pytest.fixture
def mixed():
    model = torch.nn.Linear(999, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def test_gradients_of_masters_lie_where_those_of_the_step_before_lay(mixed):
    model, optimizer = mixed
    assert len({mixed_step(model.weight, optimizer) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "keep",
    [lambda g: g, lambda g: g[1:], lambda g: g.detach(), lambda g: g.numpy()],
    ids=["tensor", "view", "alias", "array"],
)
def test_gradient_that_somebody_keeps_is_not_overwritten(mixed, keep):
    model, optimizer = mixed
    with amp.scale_loss(small_loss(model.weight), optimizer) as loss:
        loss.backward()
    (master,) = amp.master_params(optimizer)
    kept = keep(master.grad)
    optimizer.step()
    with amp.scale_loss(small_loss(model.weight) * 2, optimizer) as loss:
        loss.backward()
    assert torch.as_tensor(kept).eq(GRADIENT).all()
