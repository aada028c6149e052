"""Tests when loss scales change, and to what."""

import pytest
import torch
from torch import nn

from thalweg.amp import DynamicLossScaler, LossScaler
from thalweg.amp.fp16_utils import LossScaler as StaticLossScaler

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def update(scaler, overflow=False):
    if overflow:
        scaler.found_inf(CPU).fill_(1.0)
    return scaler.update_scale()


def test_scale_doubles_after_exactly_2000_clean_updates():
    scaler = LossScaler()
    for _ in range(1999):
        assert not update(scaler)
    assert scaler.loss_scale() == 2.0**16
    update(scaler)
    assert scaler.loss_scale() == 2.0**17
    assert scaler.unskipped == 0


def test_overflow_halves_and_starts_counting_anew():
    scaler = LossScaler(scale_window=3)
    update(scaler)
    update(scaler)
    assert update(scaler, overflow=True)
    assert scaler.state_dict() == {"loss_scale": 2.0**15, "unskipped": 0}
    assert not update(scaler)  # the finding is cleared
    update(scaler)
    assert scaler.loss_scale() == 2.0**15
    update(scaler)
    assert scaler.loss_scale() == 2.0**16


def test_scale_grows_also_where_more_updates_are_loaded_than_its_window_has():
    scaler = LossScaler(scale_window=100)
    scaler.load_state_dict({"loss_scale": 2.0**10, "unskipped": 500})
    update(scaler)
    assert scaler.state_dict() == {"loss_scale": 2.0**11, "unskipped": 0}


def test_bounds_are_kept():
    scaler = LossScaler(scale_window=1, min_loss_scale=4.0, max_loss_scale=2.0**10)
    assert scaler.loss_scale() == 2.0**10
    update(scaler)
    assert scaler.loss_scale() == 2.0**10
    for _ in range(20):
        update(scaler, overflow=True)
    assert scaler.loss_scale() == 4.0


def test_scale_and_its_inverse_are_never_zero_nor_infinite():
    scaler = LossScaler()
    for _ in range(400):
        update(scaler, overflow=True)
    scale = torch.tensor(scaler.loss_scale(), dtype=torch.float32)
    assert 0 < scale < 1
    assert torch.isfinite(1 / scale)


def test_static_scale_never_changes_nor_skips():
    scaler = LossScaler(128.0)
    assert not update(scaler, overflow=True)
    assert scaler.loss_scale() == 128.0


def test_state_is_taken_over():
    scaler = LossScaler(scale_window=3)
    scaler.load_state_dict({"loss_scale": 8.0, "unskipped": 2})
    update(scaler)
    assert scaler.loss_scale() == 16.0


def test_dynamic_scaler_of_fp16_utils_keeps_its_own_intervals():
    scaler = DynamicLossScaler(init_scale=16.0, scale_window=3)
    history = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True, True):
        scaler.update_scale(overflow)
        history.append(scaler.loss_scale)
    # The count starts one before the first update: (iteration - last overflow) % 3 == 0.
    assert history == [16, 16, 32, 16, 16, 16, 32, 16, 8, 4, 2, 1]
    scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    assert DynamicLossScaler().loss_scale == 2.0**32


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None])
def test_dynamic_scaler_sees_what_is_not_finite(bad):
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    params[1].grad = torch.tensor([1.0, 1.0 if bad is None else bad])
    assert DynamicLossScaler().has_overflow(params) == (bad is not None)
    assert not StaticLossScaler().has_overflow(params)


def test_scalers_of_fp16_utils_scale_losses_and_gradients():
    param = nn.Parameter(torch.ones(2))
    scaler = StaticLossScaler(4.0)
    scaler.backward(param.sum(), retain_graph=False)
    assert param.grad.tolist() == [4.0, 4.0]
    scaled, nothing = scaler.scale_gradient(None, (torch.ones(1), None), None)
    assert scaled.tolist() == [4.0]
    assert nothing is None
    scaler.update_scale(True)
    assert scaler.loss_scale == 4.0
