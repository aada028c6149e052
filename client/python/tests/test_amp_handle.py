"""Tests the handle of the first generation of apex's AMP."""

import types

import pytest
import torch
import torch.nn.functional as F
from amp_models import Exact, casts_off_afterwards
from torch import nn, optim

from thalweg import amp


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def exact(handle, scale=128.0, num_loss=None):
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    if num_loss is not None:
        optimizer = handle.wrap_optimizer(optimizer, num_loss=num_loss)
        for scaler in optimizer._scalers:
            scaler.load_state_dict({"loss_scale": scale, "unskipped": 0})
    return model, optimizer


def loss_of(model, *inputs):
    return model(torch.tensor(inputs))


def test_init_gives_an_active_handle_until_it_is_deactivated():
    with amp.init() as handle:
        assert isinstance(handle, amp.AmpHandle)
        assert handle.is_active()
        assert handle.has_cache
        assert not handle.verbose
        with handle._disable_casts():
            assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
        assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16
    assert not handle.is_active()
    assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_second_init_takes_the_place_of_the_first():
    first = amp.init()
    second = amp.init()
    assert not first.is_active()
    second._deactivate()
    assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


def test_scale_loss_of_the_handle_unscales_and_skips_overflows_once():
    handle = amp.init(loss_scale=128.0)
    model, optimizer = exact(handle)
    with handle.scale_loss(loss_of(model, 1.0, 2.0), optimizer) as scaled:
        assert scaled.item() == 128.0 * 5.0
        scaled.backward()
    assert model.weight.grad.tolist() == [1.0, 2.0]
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]

    handle = amp.init()
    with handle.scale_loss(loss_of(model, float("inf"), 2.0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, 1.0, 2.0), optimizer) as scaled:
        assert scaled.item() == 2.0**15 * (0.75 + 3.0)
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [0.5, 1.0]


def test_backward_of_the_loss_itself_is_warned_of():
    handle = amp.init()
    model, optimizer = exact(handle)
    loss = loss_of(model, 1.0, 2.0)
    with (
        pytest.warns(UserWarning, match="called on the loss inside scale_loss"),
        handle.scale_loss(loss, optimizer),
    ):
        loss.backward()


def test_wrapped_optimizer_has_a_scale_for_each_loss_and_adds_gradients_up():
    handle = amp.init()
    model, optimizer = exact(handle, num_loss=2)
    with (
        pytest.raises(RuntimeError, match="called after wrap_optimizer"),
        handle.scale_loss(loss_of(model, 1.0, 1.0), optimizer),
    ):
        pass
    for inputs in ((1.0, 2.0), (4.0, 8.0)):
        with optimizer.scale_loss(loss_of(model, *inputs)) as scaled:
            scaled.backward()
    assert model.weight.grad.tolist() == [5.0, 10.0]
    with (
        pytest.raises(RuntimeError, match="called 3 times before step"),
        optimizer.scale_loss(loss_of(model, 1.0, 1.0)),
    ):
        pass
    optimizer.step()
    assert model.weight.tolist() == [-0.25, -0.5]
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("overflowing", [0, 1])
def test_overflow_of_either_loss_skips_and_halves_its_own_scale(overflowing):
    handle = amp.init()
    model, optimizer = exact(handle, num_loss=2)
    for number in range(2):
        first = float("nan") if number == overflowing else 1.0
        with optimizer.scale_loss(loss_of(model, first, 2.0)) as scaled:
            scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    scales = [scaler.loss_scale() for scaler in optimizer._scalers]
    assert scales == [64.0 if number == overflowing else 128.0 for number in range(2)]


def test_loss_that_reaches_other_parameters_keeps_gradients_of_the_first():
    handle = amp.init()
    model, late = Exact(), nn.Parameter(torch.tensor(1.0))
    sgd = optim.SGD([model.weight, late], lr=0.25)
    optimizer = handle.wrap_optimizer(sgd, num_loss=2)
    with optimizer.scale_loss(loss_of(model, 1.0, 2.0)) as scaled:
        scaled.backward()
    with optimizer.scale_loss(late * 3.0) as scaled:
        scaled.backward()
    assert model.weight.grad.tolist() == [1.0, 2.0]
    assert late.grad.item() == 3.0


def test_wrapped_optimizer_is_otherwise_the_optimizer():
    handle = amp.init()
    _, optimizer = exact(handle, num_loss=1)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2
    assert "SGD" in repr(optimizer)
    with pytest.raises(NotImplementedError, match="was given a closure"):
        optimizer.step(lambda: 0)
    with pytest.raises(ValueError, match="num_loss is 0"):
        handle.wrap_optimizer(optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), num_loss=0)


def test_handle_that_does_nothing_has_the_same_calls():
    handle = amp.init(enabled=False)
    assert isinstance(handle, amp.NoOpHandle)
    assert not isinstance(handle, amp.AmpHandle)
    model, optimizer = exact(handle)
    loss = loss_of(model, 1.0, 2.0)
    with handle._disable_casts(), handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    wrapped = handle.wrap_optimizer(optimizer, num_loss=1)
    assert isinstance(wrapped, amp.OptimWrapper)
    for _ in range(2):  # with more losses than one, nothing is counted
        with wrapped.scale_loss(loss) as scaled:
            assert scaled is loss
    loss.backward()
    wrapped.step()
    assert model.weight.tolist() == [0.75, 1.5]
    handle._clear_cache()
    handle._deactivate()
    assert not (handle.is_active() or handle.has_cache or handle.verbose)


def test_annotated_functions_cast_only_while_casts_are_on():
    @amp.half_function
    def narrow(x, *, y):
        return x.dtype, y[0].dtype

    @amp.float_function
    def wide(x):
        return x.dtype

    @amp.promote_function
    def widest(x, y):
        return x.dtype, y.dtype

    full, half = torch.ones(1), torch.ones(1, dtype=torch.float16)
    assert narrow(full, y=[half]) == (torch.float32, torch.float16)
    assert wide(half) is torch.float16
    amp.init()
    assert narrow(full, y=[full]) == (torch.float16, torch.float16)
    assert wide(half) is torch.float32
    assert widest(half, full) == (torch.float32, torch.float32)
    assert widest(half, half) == (torch.float16, torch.float16)


def test_registered_functions_cast_from_the_next_init_on():
    mine = types.ModuleType("mine")
    mine.narrow = mine.wide = lambda x: x.dtype
    mine.widest = lambda x, y: (x.dtype, y.dtype)
    for register, name in (
        (amp.register_half_function, "narrow"),
        (amp.register_float_function, "wide"),
        (amp.register_promote_function, "widest"),
    ):
        register(mine, name)
        with pytest.raises(ValueError, match="mine has no function 'absent'"):
            register(mine, "absent")
    full, half = torch.ones(1), torch.ones(1, dtype=torch.float16)
    assert mine.narrow(full) is torch.float32
    handle = amp.init()
    assert mine.narrow(full) is torch.float16
    assert mine.wide(half) is torch.float32
    assert mine.widest(half, full) == (torch.float32, torch.float32)
    handle._deactivate()
    assert mine.narrow(full) is torch.float32


def test_rnn_cast_reaches_weights_in_lists(capsys):
    backend = types.ModuleType("backend")
    backend.cell = lambda x, weights: (x @ weights[0]).dtype
    handle = amp.init()
    amp.rnn_cast(backend, "cell", handle, verbose=True)
    assert backend.cell(torch.ones(1, 1), [torch.ones(1, 1)]) is torch.float16
    assert capsys.readouterr().out == "Float->Half (cell)\n" * 2
    handle._deactivate()
    assert backend.cell(torch.ones(1, 1), [torch.ones(1, 1)]) is torch.float32


def test_malformed_arguments_are_refused():
    with pytest.raises(ValueError, match="loss_scale is 'fast'"):
        amp.init(loss_scale="fast")
    with pytest.raises(ValueError, match=r"half_dtype is torch\.float32"):
        amp.init(half_dtype=torch.float32)
