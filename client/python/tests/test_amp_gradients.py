"""Gradients of float32 masters between backward and step, with the fused optimizers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, loss_of, network, setup
from torch import nn
from torch.nn import Parameter

import thalweg.compat  # noqa: F401 - gives torch the names
from thalweg import amp
from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def second_step(kind=FusedSGD, values=(1.0, 2.0), lr=0.25, **options):
    """An Exact whose optimizer has taken a step, of zeros, and so has the state of a later one."""
    model = Exact(values)
    optimizer = kind(model.parameters(), lr=lr)
    setup(model, optimizer, "O2", **{"loss_scale": 128.0} | options)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 0})
    backward(model, optimizer, [0.0, 0.0])
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def types_of(model, optimizer):
    """The classes of the model's parameters and of the masters."""
    return {type(param) for param in [*model.parameters(), *amp.master_params(optimizer)]}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_stay_of_the_class_parameter(level):
    model = network()
    optimizer = FusedSGD(model.parameters(), lr=0.01)
    setup(model, optimizer, level)
    for number in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
            scaled.backward()
            assert types_of(model, optimizer) == {Parameter}
        assert types_of(model, optimizer) == {Parameter}
        optimizer.step()
        assert types_of(model, optimizer) == {Parameter}


def test_parameters_stay_of_the_class_parameter_under_gradscaler():
    model = network()
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    torch.cuda.amp.aiak_amp_decorate(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(types_of(model, optimizer)))
    for number in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [{Parameter}] * 3


def test_masters_have_the_gradient_divided_when_the_context_ends():
    model, optimizer = second_step()
    backward(model, optimizer, [1.0, 2.0])
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.tolist() == [1.0, 2.0]
    assert master.grad.dtype is torch.float32
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0**0.5 / 2)
    optimizer.step()
    # 0.25 times half the gradient; torch's norm and its 1e-6 are off by less than 1e-6.
    expected = torch.tensor([0.875, 1.75])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight, master.half())


def test_who_writes_into_gradients_of_the_model_changes_nothing_of_the_masters():
    model, optimizer = second_step()
    kept = []
    model.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    backward(model, optimizer, [1.0, 2.0])
    kept[0].zero_()
    model.weight.grad.data.zero_()
    model.zero_grad()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_second_backward_adds_to_the_gradients_of_the_first():
    model, optimizer = second_step()
    backward(model, optimizer, [1.0, 2.0])
    backward(model, optimizer, [2.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.25, 1.0]


def test_gradient_that_is_assigned_to_a_master_is_the_one_that_counts():
    model, optimizer = second_step()
    backward(model, optimizer, [1.0, 2.0])
    (master,) = optimizer.param_groups[0]["params"]
    master.grad = torch.tensor([4.0, 4.0])
    optimizer.step()
    assert model.weight.tolist() == [0.0, 1.0]


def test_gradients_that_are_cleared_instead_of_used_are_forgotten():
    model, optimizer = second_step()
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad()
    assert [p.grad for p in (model.weight, *amp.master_params(optimizer))] == [None, None]
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_gradients_that_are_cleared_to_zeros_are_zeros_of_masters():
    model, optimizer = second_step(FusedAdamW)
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad(set_to_none=False)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [0.0, 0.0]
    optimizer.step()
    assert optimizer.state[master]["step"] == 2


@pytest.mark.parametrize("kind", [FusedAdamW, FusedLAMB])
def test_backward_of_another_loss_changes_nothing(kind):
    """Two networks, of which one's loss gives gradients to the other as well, as in a GAN."""

    def run(has_other_loss):
        torch.manual_seed(0)
        maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
        makes, judges = (kind(m.parameters(), lr=0.01) for m in (maker, judge))
        setup([maker, judge], [makes, judges], "O2", loss_scale=128.0, num_losses=2)
        for _ in range(4):
            makes.zero_grad()
            judges.zero_grad()
            fake = maker(torch.randn(4, 8))
            with amp.scale_loss(judge(fake.detach()).square().mean(), judges) as scaled:
                scaled.backward()
            if has_other_loss:
                with amp.scale_loss((judge(fake) - 1).square().mean(), makes, loss_id=1) as scaled:
                    scaled.backward()
            judges.step()
        return [param.detach().clone() for param in judge.parameters()]

    for ours, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, expected)


def test_backward_into_a_parameter_without_gradient_changes_nothing():
    model = nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model[0](torch.tensor([1.0, 1.0])), optimizer) as scaled:
            scaled.backward()
        with amp.scale_loss(model[1](torch.tensor([1.0, 1.0])), []) as scaled:
            scaled.backward()
        optimizer.step()
    assert model[0].weight.tolist() == [0.25, 1.25]
    assert model[1].weight.tolist() == [1.0, 2.0]


def test_gradients_made_in_inference_mode_are_stepped():
    model, optimizer = second_step()
    with amp.scale_loss(torch.zeros(()), optimizer), torch.inference_mode():
        model.weight.grad = torch.tensor([128.0, 256.0], dtype=torch.float16)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_parameter_that_comes_before_the_step_waits_for_the_next_backward():
    model, optimizer = second_step()
    late = Parameter(torch.ones(2, dtype=torch.float16))
    backward(model, optimizer, [1.0, 2.0])
    late.grad = torch.full((2,), 128.0, dtype=torch.float16)
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert late.tolist() == [1.0, 1.0]


def test_another_fused_optimizer_of_the_masters_finds_their_gradients():
    model, optimizer = second_step()
    (master,) = optimizer.param_groups[0]["params"]
    other = FusedSGD([master], lr=0.5)
    backward(model, optimizer, [1.0, 2.0])
    other.step()
    assert master.tolist() == [0.5, 1.0]


def test_step_that_was_skipped_has_no_norm():
    model = Exact()
    optimizer = FusedSGD(model.parameters(), lr=0.25, max_grad_norm=8.0)
    setup(model, optimizer, "O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    norms = []
    for inputs in ([3.0, 4.0], [3.0, 4.0], [float("inf"), 4.0], [3.0, 4.0]):
        optimizer.zero_grad()
        backward(model, optimizer, inputs)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert norms == [5.0, 5.0, None, 5.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_take_nothing_from_it(duplicate):
    model, optimizer = second_step()
    backward(model, optimizer, [1.0, 2.0])
    copied = duplicate(model)
    assert type(copied.weight) is Parameter
    assert torch.equal(copied.weight, model.weight)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert copied.weight.tolist() == [1.0, 2.0]


def test_optimizer_that_is_dropped_before_its_step_is_freed():
    model, optimizer = second_step()
    backward(model, optimizer, [1.0, 2.0])
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    assert model.weight.grad.tolist() == [128.0, 256.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_that_the_script_clears_in_the_model_is_in_no_later_step(set_to_none):
    model, optimizer = second_step()
    backward(model, optimizer, [64.0, 64.0])
    model.zero_grad(set_to_none)  # and takes no step
    backward(model, optimizer, [1.0, 2.0])
    assert [grad.tolist() for grad in grads_of(optimizer)] == [[1.0, 2.0]]


def test_gradient_of_an_earlier_backward_is_cleared_with_those_of_the_last():
    layers = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    optimizer = FusedSGD(layers.parameters(), lr=0.5)
    setup(layers, optimizer, "O2", loss_scale=128.0)
    ones = torch.ones(1, 2).half()
    for layer in layers:  # the second backward gives the first layer nothing
        with amp.scale_loss(layer(ones).sum(), optimizer) as scaled:
            scaled.backward()
    assert [grad.tolist() for grad in grads_of(optimizer)] == [[[1.0, 1.0]]] * 2
    layers.zero_grad()
    with amp.scale_loss(layers[1](ones).sum(), optimizer) as scaled:
        scaled.backward()
    assert [param.grad is None for param in amp.master_params(optimizer)] == [True, False]


def test_step_without_scale_loss_is_refused():
    model = network()
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    setup(model, optimizer, "O2")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="gradients that no scale_loss"):
        optimizer.step()
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def grads_of(optimizer):
    return [param.grad for param in amp.master_params(optimizer)]
