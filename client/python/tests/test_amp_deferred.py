"""Gradients of masters that a fused step reads where backward has left them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, loss_of, network, setup
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import thalweg.compat  # noqa: F401 - gives torch the names
from thalweg import amp
from thalweg.amp import _gradients
from thalweg.amp._masters import master_of
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD, _plan
from thalweg.optim._copies import raw_grad

KINDS = [
    (FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (FusedAdamW, {"lr": 0.01, "amsgrad": True}),
    (FusedSGD, {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    (FusedLAMB, {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.1}),
    (FusedSGD, {"lr": 0.01, "max_grad_norm": 0.1}),
]
IDS = [kind.__name__ for kind, _ in KINDS]


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


@pytest.fixture
def calls(monkeypatch):
    """The functions that made gradients of masters, and of how many."""
    found = []

    def note(name):
        original = getattr(_gradients, name)

        def noting(grads, *rest):
            found.append((name, len(grads)))
            return original(grads, *rest)

        monkeypatch.setattr(_gradients, name, noting)

    for name in ("gather", "gather_unscaled", "gather_divided"):
        note(name)
    return found


def do_nothing(model, optimizer):
    pass


def look(model, optimizer):
    assert any(master.grad is not None for master in amp.master_params(optimizer))


def train_apex(model, optimizer, steps, before_step=do_nothing):
    for number in steps:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
            scaled.backward()
        before_step(model, optimizer)
        optimizer.step()


def train_native(model, optimizer, steps, before_step=do_nothing):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    # Hooks of a step are all that comes between the scaler's look and the step.
    handle = optimizer.register_step_pre_hook(lambda *_: before_step(model, optimizer))
    for number in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.remove()


def train_without_scale(model, optimizer, steps, before_step=do_nothing):
    handle = optimizer.register_step_pre_hook(lambda *_: before_step(model, optimizer))
    for number in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
    handle.remove()


def open_apex(kind, options, **more):
    model = network()
    optimizer = kind(model.parameters(), **options)
    setup(model, optimizer, "O2", **{"loss_scale": "dynamic", **more})
    return model, optimizer


def open_native(kind, options):
    model = network()
    optimizer = kind(model.parameters(), **options)
    return torch.cuda.amp.aiak_amp_decorate(model, optimizer, loss_scale=256.0)


WAYS = {
    "scale_loss": (open_apex, train_apex),
    "bfloat16": (
        lambda kind, options: open_apex(kind, options, half_dtype=torch.bfloat16, loss_scale=1.0),
        train_apex,
    ),
    "GradScaler": (open_native, train_native),
    "no scale": (open_native, train_without_scale),
}


def bits(model, optimizer):
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    found = [*model.parameters(), *amp.master_params(optimizer), *state]
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_step_that_reads_the_model_has_the_bits_of_one_whose_gradients_were_made(
    way, kind, options, calls
):
    build, train = WAYS[way]
    results = []
    for before_step in (do_nothing, look):
        model, optimizer = build(kind, options)
        train(model, optimizer, range(1))  # makes the plan that later steps follow
        calls.clear()
        train(model, optimizer, range(1, 6), before_step)
        # Of four half-precision parameters, in five steps.
        assert [number for _, number in calls] == ([] if before_step is do_nothing else [4] * 5)
        results.append(bits(model, optimizer))
    assert len(results[0]) == len(results[1]) >= 12
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
@pytest.mark.parametrize(("kind", "options"), KINDS[-2:], ids=IDS[-2:])
def test_check_of_deferred_gradients_and_their_norm_are_one_sum(way, kind, options, monkeypatch):
    sums = []
    real = _plan.Plan.grad_squares
    monkeypatch.setattr(_plan.Plan, "grad_squares", lambda plan: sums.append(1) or real(plan))
    build, train = WAYS[way]
    model, optimizer = build(kind, options)
    train(model, optimizer, range(1))
    sums.clear()
    train(model, optimizer, range(1, 4))
    assert len(sums) == 3
    train(model, optimizer, range(4, 5), look)  # the step has other gradients than the check
    assert len(sums) == 5


def deferred(kind=FusedSGD, values=(1.0, 2.0), lr=0.25, **options):
    """An Exact whose next gradients are deferred."""
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


def test_who_looks_at_a_master_finds_the_gradient_divided(calls):
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    calls.clear()
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.tolist() == [1.0, 2.0]
    assert master.grad.dtype is torch.float32
    assert len(calls) == 1
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0**0.5 / 2)
    optimizer.step()
    # 0.25 times half the gradient; torch's norm and its 1e-6 are off by less than 1e-6.
    expected = torch.tensor([0.875, 1.75])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight, master.half())
    assert len(calls) == 1


def test_who_writes_into_gradients_of_the_model_changes_nothing_of_the_masters():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    model.weight.grad.data.zero_()  # which torch does not count
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_model_without_gradients_before_the_step_is_stepped_all_the_same():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    model.zero_grad()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_gradient_changed_by_a_reference_from_before_is_refused():
    model, optimizer = deferred()
    kept = []
    model.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    backward(model, optimizer, [1.0, 2.0])
    kept[0].zero_()
    for use in (optimizer.step, lambda: model.weight.grad):
        with pytest.raises(RuntimeError, match="references from before"):
            use()
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_second_backward_adds_to_what_the_first_left():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    backward(model, optimizer, [2.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.25, 1.0]


def test_gradient_that_is_assigned_to_a_master_is_the_one_that_counts():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    (master,) = optimizer.param_groups[0]["params"]
    master.grad = torch.tensor([4.0, 4.0])
    optimizer.step()
    assert model.weight.tolist() == [0.0, 1.0]


def test_overflow_that_is_found_in_the_model_skips_the_step(calls):
    model, optimizer = deferred(FusedAdamW, loss_scale="dynamic")
    calls.clear()
    steps = [s["step"].item() for s in optimizer.state.values()]
    backward(model, optimizer, [float("inf"), 1.0])
    assert amp._amp_state.loss_scalers[0].loss_scale() == 64.0
    before = bits(model, optimizer)
    optimizer.step()
    assert [s["step"].item() for s in optimizer.state.values()] == steps == [1.0]
    for ours, expected in zip(bits(model, optimizer), before, strict=True):
        assert torch.equal(ours, expected)
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert [s["step"].item() for s in optimizer.state.values()] == [2.0]
    assert not calls


def test_gradients_that_are_cleared_instead_of_used_are_forgotten():
    model, optimizer = deferred()
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad()
    assert [p.grad for p in (model.weight, *amp.master_params(optimizer))] == [None, None]
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_gradients_that_are_cleared_to_zeros_are_zeros_of_masters():
    model, optimizer = deferred(FusedAdamW)
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad(set_to_none=False)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [0.0, 0.0]
    optimizer.step()
    assert optimizer.state[master]["step"] == 2


def adversaries(kind, before_step):
    """Four steps of two networks, of which one's loss gives gradients to the other as well."""
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
        with amp.scale_loss((judge(fake) - 1).square().mean(), makes, loss_id=1) as scaled:
            scaled.backward()
        before_step(None, judges)
        judges.step()
        makes.step()
    return [p.detach().clone() for model in (maker, judge) for p in model.parameters()]


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)


@pytest.mark.parametrize("before_step", [do_nothing, clip])
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLAMB])
def test_backward_of_another_loss_changes_nothing(kind, before_step, monkeypatch):
    results = []
    for defers in (True, False):
        if not defers:
            monkeypatch.setattr(_gradients, "can_defer", lambda *_: False)
        results.append(adversaries(kind, before_step))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_backward_into_a_parameter_without_gradient_changes_nothing():
    model = nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model[0](torch.tensor([1.0, 1.0])), optimizer) as scaled:
            scaled.backward()
        model[1](torch.tensor([1.0, 1.0])).backward()
        optimizer.step()
    assert model[0].weight.tolist() == [0.25, 1.25]
    assert model[1].weight.tolist() == [1.0, 2.0]


def test_look_in_inference_mode_leaves_ordinary_gradients():
    model, optimizer = deferred()
    backward(model, optimizer, [3.0, 4.0])
    (master,) = amp.master_params(optimizer)
    with torch.inference_mode():
        assert master.grad.norm() == 5.0
    nn.utils.clip_grad_norm_([master], 2.5)
    optimizer.step()
    expected = torch.tensor([1.0 - 0.375, 2.0 - 0.5])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=1e-6)


def test_gradients_made_in_inference_mode_are_stepped():
    model, optimizer = deferred()
    with amp.scale_loss(torch.zeros(()), optimizer), torch.inference_mode():
        grad = torch.tensor([128.0, 256.0], dtype=torch.float16)
        model.weight.grad = grad
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_parameter_that_comes_before_the_step_waits_for_the_next_backward():
    model, optimizer = deferred()
    late = Parameter(torch.ones(2, dtype=torch.float16))
    backward(model, optimizer, [1.0, 2.0])
    late.grad = torch.full((2,), 128.0, dtype=torch.float16)
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert late.tolist() == [1.0, 1.0]


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


def test_gradients_that_are_cleared_are_not_kept_for_a_norm():
    model, optimizer = deferred(FusedLAMB, loss_scale="dynamic")
    backward(model, optimizer, [3.0, 4.0])
    storage = StorageWeakRef(raw_grad.__get__(model.weight).untyped_storage())
    assert not storage.expired()
    optimizer.zero_grad()
    assert storage.expired()


def test_parameters_without_gradient_stay_and_are_rounded_into_the_model():
    model = nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    _, idle = amp.master_params(optimizer)
    for number in range(3):
        with torch.no_grad():
            idle.fill_(number + 0.1)
        optimizer.zero_grad()
        with amp.scale_loss(model[0](torch.tensor([1.0, 2.0])), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        expected = torch.full((2,), number + 0.1, dtype=torch.float16)
        assert torch.equal(model[1].weight, expected)
    assert model[0].weight.tolist() == [0.25, 0.5]


def test_two_optimizers_of_one_parameter_both_take_its_gradient():
    model = Exact()
    optimizers = [FusedSGD(model.parameters(), lr=lr) for lr in (0.25, 0.5)]
    setup(model, optimizers, "O2", loss_scale=128.0)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(model(torch.tensor([1.0, 1.0])), optimizers) as scaled:
            scaled.backward()
        gradients = [master_of(model.weight).weight.grad.clone()]
        optimizers[0].step()
        master_of(model.weight).weight.grad = gradients[0]  # a step clears what it has used
        optimizers[1].step()
    assert model.weight.tolist() == [1.0 - 3 * 0.75, 2.0 - 3 * 0.75]


def test_another_fused_optimizer_of_the_masters_finds_their_gradients():
    model, optimizer = deferred()
    (master,) = optimizer.param_groups[0]["params"]
    other = FusedSGD([master], lr=0.5)
    master.grad = torch.zeros(2)
    other.step()  # has a plan from now on
    master.grad = None
    backward(model, optimizer, [1.0, 2.0])
    other.step()
    assert master.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("scale", [100.0, 0.5])
def test_scale_by_which_not_all_can_be_divided_is_not_left_to_the_step(scale, calls):
    model, optimizer = open_apex(FusedSGD, {"lr": 0.01}, loss_scale=scale)
    train_apex(model, optimizer, range(3))
    assert [number for _, number in calls] == [4] * 3


def test_who_clips_in_every_step_has_gradients_made_in_one_pass(calls):
    model, optimizer = open_apex(FusedSGD, {"lr": 0.01})
    train_apex(model, optimizer, range(11), look)
    once = ["gather_unscaled"] * _gradients._STEPS_WITHOUT_DEFERRAL
    expected = ["gather_unscaled", "gather_divided", *once, "gather_divided"]
    assert [name for name, _ in calls] == expected


def test_who_accumulates_in_every_step_has_nothing_deferred(calls):
    """Forward, which may have been compiled for ordinary parameters, comes between backwards."""
    model, optimizer = deferred()
    for number in range(3):
        calls.clear()
        types = []
        for _ in range(2):
            types.append(type(model.weight))
            backward(model, optimizer, [1.0, 1.0])
        optimizer.step()
        optimizer.zero_grad()
        assert len(calls) == 2
        # Before that it cannot be known.
        assert number == 0 or types == [Parameter] * 2
    assert model.weight.tolist() == [-0.5, 0.5]


def test_parameters_have_another_class_only_while_gradients_are_deferred():
    model, optimizer = deferred()
    (master,) = optimizer.param_groups[0]["params"]
    backward(model, optimizer, [1.0, 2.0])
    assert isinstance(master, Parameter)
    assert Parameter not in {type(master), type(model.weight)}
    optimizer.step()
    assert type(master) is type(model.weight) is Parameter


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_are_ordinary_and_take_nothing_from_it(duplicate):
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    copied = duplicate(model)
    assert type(copied.weight) is Parameter
    assert torch.equal(copied.weight, model.weight)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert copied.weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_optimizer_without_masters_is_left_alone(level):
    model = network()
    optimizer = FusedSGD(model.parameters(), lr=0.01)
    setup(model, optimizer, level)
    train_apex(model, optimizer, range(2))
    assert {type(param) for param in model.parameters()} == {Parameter}


def test_optimizer_that_is_dropped_before_its_step_is_freed():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    assert model.weight.grad.tolist() == [128.0, 256.0]
    assert type(model.weight) is Parameter
