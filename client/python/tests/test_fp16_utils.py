"""Tests FP16_Optimizer and the functions that it consists of."""

import copy

import pytest
import torch
from torch import nn, optim

from thalweg.amp import FP16_Optimizer, fp16_utils

pytestmark = pytest.mark.numeric


def exact(lr=0.25, **options):
    param = nn.Parameter(torch.tensor([1.0, 2.0]).half())
    own = nn.Parameter(torch.tensor([1.0]))
    return param, own, FP16_Optimizer(optim.SGD([param, own], lr=lr), verbose=False, **options)


def loss_of(param, own, x=1.0):
    return (param.float() * torch.tensor([x, 2.0])).sum() + own.sum()


DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}}


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 64.0}, DYNAMIC])
def test_step_updates_masters_and_rounds_them(options):
    param, own, optimizer = exact(**options)
    optimizer.zero_grad()
    optimizer.backward(loss_of(param, own))
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype is torch.float32
    assert optimizer.inspect_master_grad_data()[0][0].tolist() == [1.0, 2.0]
    optimizer.step()
    assert param.dtype is torch.float16
    assert param.tolist() == master.tolist() == [0.75, 1.5]
    assert own.tolist() == [0.75]


def test_masters_follow_whoever_writes_into_the_model():
    param, own, optimizer = exact()
    with torch.no_grad():
        param.copy_(torch.tensor([3.0, 4.0]))  # as a broadcast from rank 0 does
    optimizer.backward(loss_of(param, own))
    optimizer.step()
    assert param.tolist() == [2.75, 3.5]


def test_parameters_that_come_late_get_masters():
    param, own, optimizer = exact()
    late = nn.Parameter(torch.tensor([1.0]).half())
    optimizer.optimizer.add_param_group({"params": [late]})
    optimizer.backward(loss_of(param, own) + 2 * late.float().sum())
    assert optimizer.param_groups[1]["params"][0].dtype is torch.float32
    optimizer.step()
    assert (param.tolist(), late.tolist()) == ([0.75, 1.5], [0.5])


def test_several_losses_are_gathered_once():
    param, own, optimizer = exact(static_loss_scale=8.0)
    optimizer.backward(loss_of(param, own), update_master_grads=False)
    optimizer.backward(loss_of(param, own, 3.0), update_master_grads=False)
    optimizer.update_master_grads()
    assert optimizer.inspect_master_grad_data()[0][0].tolist() == [4.0, 4.0]
    assert own.grad.tolist() == [2.0]
    optimizer.zero_grad(set_grads_to_None=True)
    assert param.grad is None


@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 64.0}, DYNAMIC])
@pytest.mark.parametrize("updates", [(True, True), (True, False), (False, True), (False, False)])
def test_losses_add_up_whenever_masters_are_given_their_sum(options, updates):
    param, own, optimizer = exact(**options)
    for steps in range(1, 3):
        optimizer.zero_grad()
        for x, update in zip((1.0, 3.0), updates, strict=True):
            optimizer.backward(loss_of(param, own, x), update_master_grads=update)
        optimizer.update_master_grads()
        optimizer.update_master_grads()
        assert optimizer.inspect_master_grad_data()[0][0].tolist() == [4.0, 4.0]
        assert own.grad.tolist() == [2.0]
        optimizer.step()
        assert param.tolist() == [1.0 - steps, 2.0 - steps]
        assert own.tolist() == [1.0 - 0.5 * steps]


def test_overflow_of_a_later_loss_skips_the_step_of_all():
    param, own, optimizer = exact(**DYNAMIC)
    for x in (1.0, float("inf")):
        optimizer.backward(loss_of(param, own, x))
    optimizer.step()
    assert (param.tolist(), own.tolist()) == ([1.0, 2.0], [1.0])
    optimizer.zero_grad()
    optimizer.backward(loss_of(param, own))
    optimizer.step()
    assert (param.tolist(), own.tolist()) == ([0.75, 1.5], [0.75])


def test_overflow_skips_and_lowers_the_scale(capsys):
    param, own, optimizer = exact(**DYNAMIC)
    optimizer.verbose = True
    optimizer.backward(loss_of(param, own, float("inf")))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1.0
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert "the loss scale is now 64.0" in capsys.readouterr().out
    assert (param.tolist(), optimizer.loss_scale) == ([1.0, 2.0], 64.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(param, own))
    optimizer.step()
    assert param.tolist() == [0.75, 1.5]


def test_clipping_gives_the_norm():
    param, own, optimizer = exact(lr=1.0)
    optimizer.backward(loss_of(param, own, 2.0))
    assert optimizer.clip_master_grads(1.5) == 3.0
    optimizer.step()
    # The gradient is divided by the norm plus 1e-6, as in torch.
    torch.testing.assert_close(own.detach(), torch.tensor([0.5]), rtol=0, atol=1e-6)


def test_closure_is_repeated_until_gradients_are_finite():
    param, own, optimizer = exact(
        dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**18}
    )
    calls = []

    def closure():
        calls.append(optimizer.loss_scale)
        optimizer.zero_grad()
        loss = loss_of(param, own)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 6.0
    # float16 holds 2·scale up to 65504.
    assert calls == [2.0**18, 2.0**17, 2.0**16, 2.0**15, 2.0**14]
    assert param.tolist() == [0.75, 1.5]


def test_closure_that_is_never_finite_is_an_error():
    param, own, optimizer = exact(**DYNAMIC)

    def closure():
        optimizer.zero_grad()
        optimizer.backward(loss_of(param, own, float("nan")))

    with pytest.raises(RuntimeError, match="not finite with loss scale 1"):
        optimizer.step(closure)


def test_resumed_run_has_the_bits_of_one_that_never_stopped():
    def setup(seed):
        torch.manual_seed(seed)
        network = fp16_utils.FP16Model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        adam = optim.Adam(network.parameters(), lr=0.01)
        return network, FP16_Optimizer(adam, dynamic_loss_scale=True, verbose=False)

    def train(network, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            optimizer.backward((network(inputs).float() - inputs).square().mean())
            optimizer.step()

    network, optimizer = setup(0)
    train(network, optimizer, range(20))
    saved = copy.deepcopy((optimizer.state_dict(), network.state_dict()))
    train(network, optimizer, range(20, 25))
    resumed, other = setup(1)
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    train(resumed, other, range(20, 25))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert other.loss_scale == optimizer.loss_scale < 2.0**32
    assert set(map(type, other.state)) == {nn.Parameter}
    with pytest.raises(ValueError, match="masters of shapes"):
        exact()[2].load_state_dict(saved[0])


def test_loaded_loss_scaler_is_of_the_saved_kind():
    _, _, static = exact(static_loss_scale=4.0)
    _, _, dynamic = exact(**DYNAMIC)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (static, dynamic)]
    param, own, loaded = exact(static_loss_scale=4.0)
    loaded.load_state_dict(saved[1])
    assert loaded.loss_scale == dynamic.loss_scale
    loaded.backward(loss_of(param, own, float("inf")))
    loaded.step()
    assert loaded.overflow
    assert param.isfinite().all()
    assert loaded.loss_scale == dynamic.loss_scale / 2
    dynamic.load_state_dict(saved[0])
    dynamic.step()
    assert not dynamic.overflow
    assert dynamic.loss_scale == 4.0
    assert dynamic.state_dict()["loss_scaler"] == saved[0]["loss_scaler"]


def test_loss_scale_may_be_set():
    _, _, optimizer = exact()
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0


@pytest.mark.parametrize("flat", [False, True])
def test_lists_of_masters_carry_gradients_and_weights(flat):
    model = nn.Linear(2, 1).half()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.zero_()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    model.weight.grad = torch.tensor([[3.0, 4.0]]).half()
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    expected = [3.0, 4.0, 0.0] if flat else [[3.0, 4.0]]
    assert masters[0].grad.tolist() == expected
    with torch.no_grad():
        masters[0].mul_(2.0)
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    assert model.weight.tolist() == [[2.0, 4.0]]


def test_flat_masters_need_one_type():
    with pytest.raises(TypeError, match=r"of torch\.float16, torch\.float32, expected one type"):
        fp16_utils.prep_param_lists(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1).half()]), True)


def test_networks_are_cast_around_batch_normalisation():
    network = fp16_utils.network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert network(torch.ones(4, 2)).dtype is torch.float16
    assert network[1][0].weight.dtype is torch.float16
    assert network[1][1].weight.dtype is torch.float32
    assert fp16_utils.tofp16()(torch.ones(1)).dtype is torch.float16
    converted = fp16_utils.convert_network(nn.Sequential(nn.BatchNorm1d(2)), torch.float16)
    assert converted[0].running_mean.dtype is torch.float32
    outer = nn.Sequential(nn.Linear(1, 1))
    fp16_utils.convert_module(outer, torch.float16)
    assert outer[0].weight.dtype is torch.float32
    fp16_utils.convert_module(outer[0], torch.float16)
    assert outer[0].weight.dtype is torch.float16
    assert fp16_utils.BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype is torch.float32


def test_small_helpers():
    assert fp16_utils.to_python_float(torch.tensor(2.0)) == 2.0
    assert fp16_utils.to_python_float([3.0]) == 3.0
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_
