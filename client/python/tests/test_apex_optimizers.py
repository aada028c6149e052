"""Tests the optimizers of `apex.optimizers`, LARC and amp_C against their formulas in float64."""

import copy

import pytest
import torch
from amp_models import Exact, casts_off_afterwards, setup
from apex_optim import (
    ADAM,
    LR,
    STEPS,
    adagrad,
    exact,
    gradient,
    novograd,
    parameters,
    run,
    set_grads,
)
from optim_cases import bound, distance
from torch import nn, optim

from thalweg import amp
from thalweg import optim as ours
from thalweg.compat._apex_larc import LARC
from thalweg.compat._apex_optimizers import FusedAdam, FusedLAMB, FusedSGD
from thalweg.compat._apex_optimizers_more import (
    FusedAdagrad,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
)
from thalweg.compat._names import aiak_amp_decorate

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("averaging", "infinite", "zero", "corrected"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, True),
        (True, False, True, True),
    ],
)
def test_novograd_follows_the_formulas(inside, averaging, infinite, zero, corrected):
    betas, decay = (0.9, 0.98), 0.1
    params = parameters()
    options = {"inside": inside, "averaging": averaging, "infinite": infinite, "zero": zero}
    expected = exact(params, novograd(betas, decay, corrected=corrected, **options))
    optimizer = FusedNovoGrad(
        params,
        LR,
        corrected,
        betas,
        weight_decay=decay,
        reg_inside_moment=inside,
        grad_averaging=averaging,
        norm_type=0 if infinite else 2,
        init_zero=zero,
    )
    run(optimizer, params)
    # A step moves at most by lr·g/‖g‖ without averaging, ten times that.
    assert distance(params, expected) <= bound(STEPS, 10 * LR)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adagrad_follows_the_formulas(decoupled):
    params = parameters()
    expected = exact(params, adagrad(0.1, decoupled=decoupled))
    run(FusedAdagrad(params, LR, weight_decay=0.1, adagrad_w_mode=decoupled), params)
    assert distance(params, expected) <= bound(STEPS, LR)


@pytest.mark.parametrize("kind", [FusedNovoGrad, FusedAdagrad])
def test_state_of_half_parameters_is_float32_and_resumes_with_the_same_bits(kind):
    whole, halves = parameters(torch.float16), parameters(torch.float16)
    optimizer = kind(whole, LR)
    run(optimizer, whole)
    first = kind(halves, LR)
    run(first, halves, range(2))
    second = kind(halves, LR)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, halves, range(2, STEPS))
    assert all(map(torch.equal, whole, halves))
    kinds = {value.dtype for state in second.state.values() for value in state.values()}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("kind", [FusedNovoGrad, FusedAdagrad])
def test_groups_that_are_to_ascend_are_refused_where_nothing_does(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} has no maximize"):
        kind([{"params": parameters(), "maximize": True}])
    optimizer = kind([{"params": parameters(), "maximize": False}])
    with pytest.raises(ValueError, match="has no maximize"):
        optimizer.add_param_group({"params": parameters(), "maximize": True})


@pytest.mark.parametrize(("kind", "key"), [(FusedNovoGrad, "exp_avg"), (FusedAdagrad, "sum")])
def test_hook_after_loading_has_the_last_word_on_the_state(kind, key):
    params = parameters(torch.float16)
    first, second = kind(params), kind(params)
    run(first, params)

    def hook(optimizer):
        for state in optimizer.state.values():
            state[key].fill_(2.0)

    second.register_load_state_dict_post_hook(hook)
    second.load_state_dict(first.state_dict())
    assert all((state[key] == 2.0).all() for state in second.state.values())
    assert {state[key].dtype for state in second.state.values()} == {torch.float32}


def test_sparse_gradients_are_refused():
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedAdagrad(table.parameters()).step()
    with pytest.raises(ValueError, match="norm_type is 1"):
        FusedNovoGrad(table.parameters(), norm_type=1)


@pytest.mark.parametrize(
    ("kind", "options", "plain"),
    [
        (FusedAdam, {"capturable": True, "master_weights": True}, FusedAdam),
        (FusedMixedPrecisionLamb, {"reduced_precision_dtype": torch.float16}, FusedLAMB),
    ],
)
def test_masters_follow_float32_and_parameters_are_their_rounding(kind, options, plain):
    halves = parameters(torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in halves]
    optimizer = kind(halves, **ADAM, **options)
    other = plain(wide, **ADAM)
    for step in range(STEPS):
        set_grads(halves, step)
        for half, param in zip(halves, wide, strict=True):
            param.grad = half.grad.float()
        optimizer.step()
        other.step()
    masters = optimizer.param_groups_master[0]["params"]
    assert distance(masters, [p.detach() for p in wide]) <= 2 * bound(STEPS, LR)
    assert all(torch.equal(m.half(), p) for m, p in zip(masters, halves, strict=True))


def test_masters_are_saved_and_follow_who_writes_into_parameters():
    halves = parameters(torch.float16)
    optimizer = FusedAdam(halves, LR, master_weights=True)
    run(optimizer, halves, range(2))
    others = [nn.Parameter(p.detach().clone()) for p in halves]
    resumed = FusedAdam(others, LR, master_weights=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, halves, range(2, 4))
    run(resumed, others, range(2, 4))
    assert all(map(torch.equal, halves, others))
    with torch.no_grad():
        halves[0].fill_(3.0)
    set_grads(halves, 4, scale=0.0)
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)  # no momentum: nothing moves
    optimizer.step()
    assert optimizer.param_groups_master[0]["params"][0].unique().tolist() == [3.0]


@pytest.mark.parametrize(
    "build",
    [
        lambda params: FusedAdam(params, 0.0, master_weights=True),
        lambda params: FusedMixedPrecisionLamb(params, 0.0, reduced_precision_dtype=torch.bfloat16),
    ],
)
def test_masters_follow_writes_also_after_a_step_without_their_gradient(build):
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = build([first, second])
    for has_grad in (True, False, True):
        first.grad = torch.ones_like(first) if has_grad else None
        second.grad = torch.ones_like(second)
        if not has_grad:
            with torch.no_grad():
                first.fill_(5.0)
        optimizer.step()
    assert first.tolist() == [5.0, 5.0]


def test_capturable_makes_the_rate_a_tensor_of_each_group():
    first, second = parameters()[:2]
    optimizer = FusedAdam([{"params": [first]}, {"params": [second], "lr": 0.5}], capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [rate.item() for rate in rates] == pytest.approx([1e-3, 0.5])
    rates[0].fill_(0.25)
    plain = nn.Parameter(first.detach().clone())
    other = FusedAdam([plain], lr=0.25)
    for param in (first, plain):
        param.grad = gradient(0, 0)
    optimizer.step()
    other.step()
    assert torch.equal(first, plain)


@pytest.mark.parametrize(
    "build",
    [
        FusedAdam,
        FusedLAMB,
        FusedMixedPrecisionLamb,
        lambda params: FusedAdam(params, capturable=True, master_weights=True),
    ],
)
def test_gradients_are_unscaled_after_a_step_under_a_scaler(build):
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = build([param])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert param.grad.tolist() == [2.0**16] * 2
    scaler.step(optimizer)
    scaler.update()
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("divides", ["step", "unscale_"])
def test_lamb_divides_once_and_skips_what_is_not_finite(divides):
    params, plain = parameters(), parameters()
    optimizer = FusedMixedPrecisionLamb(params, LR)
    other = FusedMixedPrecisionLamb(plain, LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes its state
    for step in range(3):
        set_grads(params, step, scale=4.0)
        set_grads(plain, step)
        if step == 1:
            params[0].grad[0, 0] = torch.inf
        if divides == "step":
            optimizer.step(grad_scaler=scaler)
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update(4.0)
        if step != 1:
            other.step()
    assert all(map(torch.equal, params, plain))


def test_hooks_of_lambs_step_run_once_also_beside_another_lamb():
    param = nn.Parameter(torch.ones(2))
    ours.FusedLAMB([param])
    optimizer = FusedMixedPrecisionLamb([param])
    param.grad = torch.ones(2)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes its state
    optimizer.step()
    optimizer.step(grad_scaler=scaler)
    assert seen == ["before", "after"] * 2


def test_steps_of_lamb_count_from_the_argument():
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedMixedPrecisionLamb([param], step=10)
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 11


@pytest.mark.parametrize(
    "build",
    [
        lambda params: FusedAdam(params, set_grad_none=False, capturable=True, master_weights=True),
        lambda params: FusedLAMB(params, set_grad_none=False),
        lambda params: FusedSGD(params, 0.5, weight_decay=0.5, wd_after_momentum=True),
        lambda params: FusedNovoGrad(params, set_grad_none=False),
        lambda params: FusedAdagrad(params, set_grad_none=False, adagrad_w_mode=True),
    ],
)
def test_copy_of_an_optimizer_keeps_its_settings(build):
    optimizer = build([nn.Parameter(torch.ones(2, dtype=torch.float16))])
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        (param,) = each.param_groups[0]["params"]
        param.grad = torch.ones_like(param)
        each.step()
        each.zero_grad()
        assert param.grad.tolist() == [0, 0]
        each.zero_grad(set_to_none=True)
    assert torch.equal(*(each.param_groups[0]["params"][0] for each in (optimizer, other)))
    assert optimizer.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("clip", [False, True])
def test_larc_follows_the_formulas(clip):
    decay, trust, lr = 0.1, 0.02, 0.02

    def update(state, p, g, _):
        size, slope = p.norm(), g.norm()
        rate = trust * size / (slope + decay * size + 1e-8)
        if clip:
            rate = (rate / lr).clamp(max=1)
        state["b"] = b = (
            0.5 * state["b"] + rate * (g + decay * p) if state else rate * (g + decay * p)
        )
        return p - lr * b

    params = parameters()
    expected = exact(params, update)
    inner = optim.SGD(params, lr=lr, momentum=0.5, weight_decay=decay)
    optimizer = LARC(inner, trust, clip)
    run(optimizer, params)
    assert distance(params, expected) <= bound(STEPS, lr)
    assert inner.param_groups[0]["weight_decay"] == decay
    assert optimizer.state_dict()["param_groups"] == inner.state_dict()["param_groups"]


def test_larc_leaves_what_has_no_norm_and_takes_schedulers_and_closures():
    param = nn.Parameter(torch.zeros(2))
    optimizer = LARC(optim.SGD([param], lr=1.0))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        param.sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    schedule.step()
    assert param.tolist() == [-1.0, -1.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_larc_trains_in_mixed_precision(level):
    with casts_off_afterwards():
        model = nn.Linear(4, 1)
        optimizer = LARC(optim.SGD(model.parameters(), lr=0.25), trust_coefficient=0.5)
        setup(model, optimizer, level, loss_scale=128.0)
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        with amp.scale_loss(model(torch.ones(2, 4)).square().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        for old, new in zip(before, amp.master_params(optimizer), strict=True):
            assert not torch.equal(old, new)


@pytest.mark.parametrize("decorates_inner", [False, True])
def test_larc_adapts_masters_where_no_scaler_has_filled_them(decorates_inner):
    def build(model):
        return optim.SGD(model.parameters(), lr=0.25, momentum=0.5, weight_decay=0.5)

    model, plain = Exact(), Exact()
    other = LARC(build(plain))
    optimizer = build(model) if decorates_inner else LARC(build(model))
    aiak_amp_decorate(model, optimizer, half_dtype=torch.bfloat16)
    optimizer = LARC(optimizer) if decorates_inner else optimizer
    for step in range(3):
        if step == 1:  # the step decays what somebody has written
            with torch.no_grad():
                for each in (model, plain):
                    each.weight.fill_(4.0)
        for each, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            each(torch.tensor([1.0, 3.0])).backward()
            its.step()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master, plain.weight)


@pytest.mark.parametrize("inner", [optim.SGD, FusedSGD, ours.FusedSGD, ours.FusedAdam])
def test_larc_takes_gradients_that_a_scaler_has_divided(inner):
    scaled, plain = (nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    optimizer, other = (LARC(inner([param], lr=0.5)) for param in (scaled, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, torch.inf, 2.0):
        scaled.grad = plain.grad = None
        scaler.scale((scaled * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor != torch.inf:
            (plain * factor).sum().backward()
            other.step()
    assert torch.equal(scaled, plain)


@pytest.mark.parametrize("build", [FusedAdam, FusedLAMB, FusedSGD, FusedNovoGrad, FusedAdagrad])
def test_complex_parameter_is_refused_and_left(build):
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    param.grad = torch.full((2,), 1 + 1j)
    with pytest.raises(RuntimeError, match=r"is torch\.complex64, expected real numbers"):
        build([param], lr=0.1).step()
    assert param.tolist() == [1, 1]


@pytest.mark.parametrize("build", [FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad])
def test_float64_parameter_keeps_its_digits(build):
    param = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    build([param], lr=1e-12).step()
    moved = before - param
    # Each of these moves it by about lr; as float32 it could not be told from another by 1e-8.
    assert bool(((moved > 0.1e-12) & (moved < 10e-12)).all())
