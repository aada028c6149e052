"""Gradients of a half model on their way to the masters: one pass, and what it stands for."""

import pytest
import torch

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
