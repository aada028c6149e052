"""Tests clipping in the step, beside torch's clip_grad_norm_ before torch's step."""

import copy
import math
import pickle

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_

from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD, _plan

pytestmark = pytest.mark.numeric

CASES = [
    (FusedAdam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (FusedAdamW, torch.optim.AdamW, {"maximize": True}),
    (FusedSGD, torch.optim.SGD, {}),
    (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
]
CLIPPED = [
    (FusedAdam, {"max_grad_norm": 0.5}),
    (FusedAdamW, {"max_grad_norm": 0.5}),
    (FusedSGD, {"momentum": 0.9, "max_grad_norm": 0.5}),
    (FusedLAMB, {"weight_decay": 0.1, "max_grad_norm": 0.5}),
]
BOUND = 1.0  # some steps of set_grads() are within it, most are far beyond
# Clipped gradients have the norm 1 at most, so that SGD with momentum moves by 10·lr.
MOVE = 1e-1


def two_groups(kind, params, **options):
    return kind([{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}], lr=1e-2, **options)


def clip_and_step(optimizer, params):
    """Clips and steps as torch does; returns whether it has clipped."""
    norm = clip_grad_norm_(params, BOUND)
    optimizer.step()
    return bool(norm > BOUND)


@pytest.mark.parametrize(("fused", "kind", "options"), CASES)
def test_follows_float64_clipped_beforehand(fused, kind, options):
    params = make_params()
    reference = copy_of(params, torch.float64)
    ours = two_groups(fused, params, max_grad_norm=BOUND, **options)
    theirs = two_groups(kind, reference, foreach=False, **options)
    clipped = set()
    for step in range(200):
        set_grads(step, params, reference)
        for lists in (params, reference):
            if step < 50:
                lists[2].grad = None  # comes late
        ours.step()
        clipped.add(clip_and_step(theirs, reference))
    assert clipped == {True, False}
    size = max(p.abs().max().item() for p in reference if p.numel())
    assert distance(params, reference) <= bound(200, MOVE, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fused", "kind", "options"), CASES)
def test_half_parameters_are_those_of_float64_rounded(fused, kind, options, dtype):
    params = make_params(dtype)
    reference = copy_of(params, torch.float64)
    ours = two_groups(fused, params, max_grad_norm=BOUND, **options)
    theirs = two_groups(kind, reference, foreach=False, **options)
    for step in range(30):
        set_grads(step, params, reference)
        ours.step()
        clip_and_step(theirs, reference)
        exact = bound(step + 1, MOVE)
        for param, expected in zip(params, reference, strict=True):
            difference = (param.double() - expected).detach().abs()
            # Rounding to nearest is off by half a unit, and below the smallest normal number by
            # half of its unit.
            size = param.detach().double().abs().clamp_min(torch.finfo(dtype).smallest_normal)
            assert (difference <= torch.finfo(dtype).eps / 2 * size + exact).all()
            expected.data.copy_(param)


@pytest.mark.parametrize(("fused", "kind", "options"), CASES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_without_a_scaler_what_is_not_finite_does_what_it_does_in_torch(
    fused, kind, options, value
):
    """The factor of an infinite norm is 0, with NaN only at the infinity; that of NaN is NaN."""
    params = make_params()
    reference = copy_of(params, torch.float64)
    ours = two_groups(fused, params, max_grad_norm=BOUND, **options)
    theirs = two_groups(kind, reference, foreach=False, **options)
    for step in range(3):
        set_grads(step, params, reference)
        if step == 1:
            for lists in (params, reference):
                lists[4].grad[7] = value
        ours.step()
        clip_and_step(theirs, reference)
    found = [torch.isnan(p.detach()) for p in params]
    assert sum(int(f.sum()) for f in found) == (
        sum(p.numel() for p in params) if math.isnan(value) else 1
    )
    for mask, param, expected in zip(found, params, reference, strict=True):
        assert torch.equal(mask, torch.isnan(expected))
        assert (param - expected).detach()[~mask].abs().le(bound(3, MOVE)).all()


@pytest.mark.parametrize(("fused", "options"), CLIPPED)
def test_scales_leave_no_trace(fused, options):
    """They are powers of two, so not even roundings differ; a skipped step changes nothing."""
    params, unscaled = make_params(), make_params()
    ours, plain = fused(params, lr=0.1, **options), fused(unscaled, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.ones(()))  # creates its state
    for step in range(6):
        set_grads(step, params, unscaled)
        for param in params:
            param.grad *= scaler.get_scale()
        if step == 3:
            params[4].grad[4000] = torch.inf
        else:
            plain.step()
        if step == 4:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        if step == 3:
            assert not ours.grad_norm.isfinite()
        else:
            assert ours.grad_norm == plain.grad_norm
    assert all(torch.equal(a, b) for a, b in zip(params, unscaled, strict=True))


def test_scale_of_zero_gives_what_it_gives_without_clipping():
    for options in ({}, {"max_grad_norm": 1.0}):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = FusedSGD([param], lr=0.1, **options)
        param.grad = torch.zeros(3)
        optimizer.grad_scale = torch.tensor(0.0)
        optimizer.step()
        assert param.isnan().all()
    assert optimizer.grad_norm.isnan()


@pytest.mark.parametrize(("fused", "options"), CLIPPED)
def test_gradients_that_are_clipped_are_not_written_to(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    set_grads(0, params)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    assert {p.grad._version for p in params} == {0}


@pytest.mark.parametrize(("fused", "options"), CLIPPED)
def test_norm_that_was_clipped_by_can_be_read(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    assert optimizer.grad_norm is None
    for step in range(3):
        set_grads(step, params)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))  # divided
        assert optimizer.grad_norm.dtype is torch.float64
        assert optimizer.grad_norm.shape == ()
        assert optimizer.grad_norm.item() == pytest.approx(exact, rel=1e-12)


def test_what_torch_adds_to_the_norm_is_added():
    params, others = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], []
    for kind, param in zip((FusedSGD, FusedAdamW), params, strict=True):
        others.append(torch.nn.Parameter(torch.zeros(1)))
        param.grad, others[-1].grad = torch.tensor([1e-6]), torch.tensor([1e-6])
        optimizer = kind([param], lr=1.0, max_grad_norm=1e-6)
        optimizer.step()
        clip_grad_norm_(others[-1:], 1e-6)
    assert -params[0].item() == pytest.approx(others[0].grad.item(), rel=1e-6)
    moment = optimizer.state[params[1]]["exp_avg"].item()
    assert moment == pytest.approx(0.1 * others[1].grad.item(), rel=1e-6)


def test_infinite_bound_measures_and_does_not_clip():
    params, others = make_params(), make_params()
    ours, plain = FusedAdamW(params, max_grad_norm=math.inf), FusedAdamW(others)
    set_grads(0, params, others)
    ours.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert ours.grad_norm.isfinite()
    assert plain.grad_norm is None
    params[4].grad[0] = others[4].grad[0] = torch.inf
    ours.step()
    plain.step()
    assert ours.grad_norm.isinf()
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_bound_may_change_from_step_to_step():
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([param], lr=1.0)
    moves = []
    for value in (5.0, 0.5, None):
        optimizer.max_grad_norm = value
        param.data.zero_()
        param.grad = torch.tensor([0.6, 0.8])
        optimizer.step()
        moves.append(param.detach().norm().item())
    assert moves == pytest.approx([1.0, 0.5, 1.0], rel=1e-5)
    assert optimizer.grad_norm is None


@pytest.mark.parametrize("fused", [FusedAdam, FusedAdamW, FusedSGD])
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_bound_that_bounds_nothing_is_refused(fused, value):
    with pytest.raises(ValueError, match=r"max_grad_norm is .*, expected more than 0, or None"):
        fused(make_params(), max_grad_norm=value)


def test_group_with_a_bound_of_its_own_is_refused():
    with pytest.raises(ValueError, match="a group has max_grad_norm, expected it as an argument"):
        FusedAdamW([{"params": make_params(), "max_grad_norm": 1.0}])


def move_of(optimizer):
    """Returns how far a long gradient moves the parameters, with lr 1."""
    optimizer.param_groups[0]["lr"] = 1.0
    params = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.full_like(param, 100.0)
    optimizer.step()
    return distance(params, before)


@pytest.mark.parametrize("theirs", [True, False])
def test_clipping_outlives_loading(theirs):
    """Checkpoints, torch's and ours, do not contain it."""
    params = make_params()
    set_grads(0, params)
    saved = torch.optim.SGD(params) if theirs else FusedSGD(params)
    saved.step()
    optimizer = FusedSGD(copy_of(params), max_grad_norm=1e-2)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.max_grad_norm == 1e-2
    assert move_of(optimizer) <= 1e-2


def test_torch_takes_a_checkpoint_as_its_own():
    params = make_params()
    ours, theirs = FusedAdamW(params, max_grad_norm=1.0), torch.optim.AdamW(copy_of(params))
    set_grads(0, params, theirs.param_groups[0]["params"])
    ours.step()
    keys = theirs.state_dict()["param_groups"][0].keys()
    assert ours.state_dict()["param_groups"][0].keys() == keys
    theirs.load_state_dict(ours.state_dict())
    theirs.step()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_clip_as_well(how):
    other = how(FusedSGD(make_params(), max_grad_norm=1e-2))
    assert move_of(other) <= 1e-2


@pytest.fixture
def sums(monkeypatch):
    """Returns a list that grows by one for each time that squares are summed."""
    done = []
    real = _plan.Plan.grad_squares
    monkeypatch.setattr(_plan.Plan, "grad_squares", lambda plan: done.append(1) or real(plan))
    return done


def scaled_run(optimizer):
    """Runs a GradScaler of scale 1, and a first step, after which it uses the plan."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    set_grads(0, optimizer.param_groups[0]["params"])
    scaler.step(optimizer)
    scaler.update()
    return scaler


@pytest.mark.parametrize(("fused", "options"), CLIPPED)
def test_the_check_for_infinities_and_the_norm_are_one_sum(fused, options, sums):
    params = make_params()
    optimizer = fused(params, **options)
    scaler = scaled_run(optimizer)
    for step in range(1, 4):
        set_grads(step, params)
        if step == 2:
            params[0].grad[0] = torch.nan
        sums.clear()
        scaler.step(optimizer)
        scaler.update()
        assert len(sums) == 1
    sums.clear()
    optimizer.step()  # the same gradients, without a check
    assert len(sums) == 1


def double(grad):
    grad.mul_(2)
    return grad


CHANGES = {"written": double, "replaced": lambda grad: grad * 2, "removed": lambda _: None}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("fused", "options"), CLIPPED)
def test_gradients_that_a_hook_changes_are_summed_anew(fused, options, change, sums):
    params, others = make_params(), make_params()
    optimizer, plain = fused(params, **options), fused(others, **options)
    scaler = scaled_run(optimizer)
    set_grads(0, others)
    plain.step()

    def hook(*_):
        params[4].grad = CHANGES[change](params[4].grad)

    optimizer.register_step_pre_hook(hook)
    set_grads(1, params, others)
    sums.clear()
    scaler.step(optimizer)
    assert len(sums) == 2
    others[4].grad = CHANGES[change](others[4].grad)
    plain.step()
    assert optimizer.grad_norm == plain.grad_norm
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_gradients_are_not_kept_after_the_step(value):
    params = make_params()
    optimizer = FusedAdamW(params, max_grad_norm=1.0)
    scaler = scaled_run(optimizer)
    set_grads(1, params)
    params[4].grad[0] = value
    grad = StorageWeakRef(params[4].grad.untyped_storage())
    scaler.step(optimizer)
    assert not grad.expired()
    optimizer.zero_grad()
    assert grad.expired()


@pytest.mark.parametrize("bound_of_norm", [None, 0, -1.0])
def test_lamb_without_clipping_needs_no_sum(bound_of_norm, sums):
    params = make_params()
    optimizer = FusedLAMB(params, max_grad_norm=bound_of_norm)
    set_grads(0, params)
    optimizer.step()
    assert not sums
    assert optimizer.grad_norm is None


def test_lamb_has_a_norm_in_torchs_operations_too():
    params = make_params()
    wide = copy_of(params, torch.float64)
    ours, theirs = FusedLAMB(params), FusedLAMB(wide)
    set_grads(0, params, wide)
    for optimizer in (ours, theirs):
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.step()
    assert theirs.grad_norm.item() == pytest.approx(ours.grad_norm.item(), rel=1e-6)
    theirs.param_groups[0]["max_grad_norm"] = None
    theirs.step()
    assert theirs.grad_norm is None
