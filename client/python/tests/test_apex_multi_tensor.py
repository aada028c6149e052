"""Tests `amp_C`'s functions on lists of tensors, against formulas in float64."""

import pytest
import torch
from apex_optim import (
    ADAM,
    LR,
    SHAPES,
    STEPS,
    adagrad,
    adam,
    exact,
    gradient,
    lamb,
    novograd,
    parameters,
    set_grads,
)
from optim_cases import bound, distance

from thalweg.compat import _apex_multi_tensor as multi
from thalweg.compat import _apex_multi_tensor_lamb as lamb_steps
from thalweg.compat import _apex_multi_tensor_steps as steps
from thalweg.compat._apex_optimizers import FusedAdam, FusedLAMB

pytestmark = pytest.mark.numeric

B1, B2 = ADAM["betas"]
EPS = ADAM["eps"]
DECAY = 0.1
FLAG = torch.zeros(1, dtype=torch.int32)
SET = torch.ones(1, dtype=torch.int32)


def number(value, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype)


def weights(dtype=torch.float32):
    return [p.detach().clone() for p in parameters(dtype)]


def zeros(count=1):
    return [[torch.zeros(shape) for shape in SHAPES] for _ in range(count)]


def gradients(step, scale=1.0):
    return [scale * gradient(step, i) for i in range(len(SHAPES))]


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16])
def test_lists_are_scaled_and_added_in_float32(source, target):
    flag = torch.zeros(1, dtype=torch.int32)
    xs = [torch.full((3,), 2.0, dtype=source), torch.full((2, 2), -4.0, dtype=source)]
    ys = [torch.full_like(x, 3.0) for x in xs]
    out = [torch.empty_like(x, dtype=target) for x in xs]
    multi.multi_tensor_applier(multi.multi_tensor_scale, flag, [xs, out], 0.25)
    assert [t.unique().item() for t in out] == [0.5, -1.0]
    multi.multi_tensor_applier(multi.multi_tensor_axpby, flag, [xs, ys, out], 2.0, 3.0, -1)
    assert [t.unique().item() for t in out] == [13.0, 1.0]
    assert flag.item() == 0
    ys[1][0, 0] = torch.nan
    multi.multi_tensor_applier(multi.multi_tensor_axpby, flag, [xs, ys, out], 2.0, 3.0, 0)
    assert flag.item() == 0
    multi.multi_tensor_applier(multi.multi_tensor_axpby, flag, [xs, ys, out], 2.0, 3.0, 1)
    assert flag.item() == 1


def test_norms_of_lists_are_those_of_float64():
    flag = torch.zeros(1, dtype=torch.int32)
    tensors = [gradient(0, i) for i in range(len(SHAPES))]
    each = torch.stack([t.double().norm() for t in tensors])
    norm, by_tensor = multi.multi_tensor_l2norm(333, flag, [tensors], True)
    # One rounding to float32 is left.
    torch.testing.assert_close(by_tensor.double(), each, rtol=2.0**-24, atol=0)
    torch.testing.assert_close(norm.double(), each.norm().reshape(1), rtol=2.0**-23, atol=0)
    half = torch.tensor([0.5])
    unscaled, none = multi.multi_tensor_unscale_l2norm(333, flag, [tensors], half)
    assert torch.equal(unscaled, norm * 0.5)
    assert none.numel() == flag.item() == 0
    halves = [torch.empty_like(t) for t in tensors]
    scaled, _ = multi.multi_tensor_l2norm_scale(333, flag, [tensors, halves], 0.5)
    assert torch.equal(scaled, unscaled)
    assert all(map(torch.equal, halves, [t / 2 for t in tensors]))
    tensors[0][0, 0] = torch.inf
    multi.multi_tensor_l2norm(333, flag, [tensors])
    assert flag.item() == 1


def test_lamb_of_lists_does_the_step_of_the_optimizer():
    params = parameters()
    optimizer = FusedLAMB(params, **ADAM, weight_decay=0.1)
    lists = [[], [p.detach().clone() for p in params]]
    lists += [[torch.zeros_like(p) for p in params] for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32)
    for step in range(STEPS):
        set_grads(params, step)
        lists[0] = [p.grad for p in params]
        norm, _ = multi.multi_tensor_l2norm(1, flag, lists[:1])
        settings = (LR, 0.9, 0.99, 1e-6, step + 1, 1, 0.1, 1, 1, norm, 1.0)
        lamb_steps.multi_tensor_lamb(1, flag, lists, *settings)
        optimizer.step()
    assert distance(lists[1], [p.detach() for p in params]) <= 2 * bound(STEPS, LR)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adam_of_lists_does_the_step_of_the_optimizer(mode, dtype):
    params = parameters(dtype)
    optimizer = FusedAdam(params, **ADAM, weight_decay=0.1, adam_w_mode=bool(mode))
    lists = [[], [p.detach().clone() for p in params]]
    lists += [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32)
    for step in range(STEPS):
        set_grads(params, step)
        lists[0] = [p.grad for p in params]
        settings = (LR, 0.9, 0.99, 1e-6, step + 1, mode, 1, 0.1)
        multi.multi_tensor_applier(steps.multi_tensor_adam, flag, lists, *settings)
        optimizer.step()
    allowed = 2 * bound(STEPS, LR)
    if dtype is torch.float16:  # a rounding of either may be the other's neighbour: 2^-9 of up to 4
        allowed = STEPS * 2.0**-8
    assert distance(lists[1], [p.detach() for p in params]) <= allowed


def test_sgd_of_lists_unscales_rounds_into_copies_and_stops_at_a_flag():
    grads, params = [torch.tensor([8.0])], [torch.tensor([3.0])]
    momenta, halves = [torch.tensor([5.0])], [torch.zeros(1, dtype=torch.float16)]
    flag = torch.zeros(1, dtype=torch.int32)

    def step(first):
        settings = (0.5, 0.5, 0.5, 0.25, False, first, False, 0.25)  # λ, μ, dampening, lr, …, scale
        lists = [grads, params, momenta, halves]
        multi.multi_tensor_applier(steps.multi_tensor_sgd, flag, lists, *settings)

    step(True)  # g = 8/4 + 3/2, which the momentum becomes without dampening
    assert (momenta[0].item(), params[0].item(), halves[0].item()) == (3.5, 2.125, 2.125)
    step(False)  # g = 2 + 2.125/2, b = (3.5 + g)/2
    assert (momenta[0].item(), params[0].item()) == (3.28125, 2.125 - 3.28125 / 4)
    flag.fill_(1)
    step(False)
    assert momenta[0].item() == 3.28125


def test_scale_is_lowered_only_after_several_overflows():
    scale, growth, left = torch.tensor([8.0]), torch.tensor([0]), torch.tensor([2])
    scales = []
    for overflow in (1.0, 1.0, 0.0, 0.0, 1.0, 0.0):
        found = torch.tensor([overflow])
        multi.update_scale_hysteresis(scale, growth, left, found, 2.0, 0.5, 2, 2)
        scales.append(scale.item())
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad_of_lists_follows_the_formulas(mode):
    params, (sums,) = weights(), zeros()
    for step in range(STEPS):
        lists = [gradients(step), params, sums]
        steps.multi_tensor_adagrad(1, FLAG, lists, LR, 1e-10, mode, DECAY)
    expected = exact(parameters(), adagrad(DECAY, decoupled=bool(mode)))
    assert distance(params, expected) <= bound(STEPS, LR)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm_type", [0, 2])
def test_novograd_of_lists_follows_the_formulas_and_keeps_norms(mode, norm_type):
    params, (averages,), norms = weights(), zeros(), torch.zeros(len(SHAPES))
    for step in range(STEPS):
        lists = [gradients(step), params, averages]
        settings = (LR, B1, B2, 1e-8, step + 1, 1, DECAY, 1, mode, norm_type)
        steps.multi_tensor_novograd(1, FLAG, lists, norms, *settings)
    reference = novograd(
        (B1, B2),
        DECAY,
        inside=mode == 0,
        averaging=True,
        infinite=norm_type == 0,
        zero=True,
        corrected=True,
    )
    # The norm starts as 0, and its correction with β2 = 0.99 makes up for it.
    assert distance(params, exact(parameters(), reference)) <= bound(STEPS, 10 * LR)
    assert (norms > 0).all()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam_of_lists_unscales_and_keeps_masters(mode, masters):
    params, moments = weights(), zeros(2)
    copies = [p.half() for p in params]
    for step in range(STEPS):
        grads = gradients(step, 128.0)
        lists = [grads, copies if masters else params, *moments]
        function = steps.multi_tensor_adam_capturable
        if masters:
            lists, function = [*lists, params], steps.multi_tensor_adam_capturable_master
        count = number(step + 1, torch.int32)
        settings = (number(LR), B1, B2, EPS, count, mode, 1, DECAY, number(1 / 128))
        function(1, FLAG, lists, *settings)
        assert all(map(torch.equal, grads, gradients(step)))
    expected = exact(parameters(), adam(DECAY, decoupled=bool(mode)))
    assert distance(params, expected) <= bound(STEPS, LR)
    if masters:
        assert all(map(torch.equal, copies, [p.half() for p in params]))
    before = [p.clone() for p in params]
    function(1, SET, lists, *settings)
    assert all(map(torch.equal, before, params))


def clipped(update, limit):
    """Gives `update` gradients whose norm, over all of a step's tensors, is at most `limit`."""

    def with_clip(state, p, g, t):
        norm = torch.cat([x.double().flatten() for x in gradients(t - 1)]).norm()
        return update(state, p, g / max(norm / limit, 1), t)

    return with_clip


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("masters", [False, True])
def test_lamb_of_scaled_lists_clips_unscales_and_rounds_into_copies(mode, masters):
    params, moments = weights(), zeros(2)
    copies = [p.half() for p in params]
    for step in range(STEPS):
        lists = [gradients(step, 128.0), params, *moments, *([copies] if masters else [])]
        norm, _ = multi.multi_tensor_l2norm_mp(1, FLAG, lists[:1])
        settings = (number(LR), B1, B2, EPS, number(step + 1, torch.int32), 1, DECAY, 1, mode)
        clip = (norm, number(128.0), False, number(0.0), number(1 / 128))
        lamb_steps.multi_tensor_lamb_mp(1, FLAG, lists, *settings, *clip)
    expected = exact(parameters(), clipped(lamb(DECAY, decoupled=bool(mode)), 1.0))
    # A step moves by at most lr·‖w‖, and no element of w is larger than ‖w‖, below 10 here.
    assert distance(params, expected) <= bound(STEPS, 10 * LR)
    if masters:
        assert all(map(torch.equal, copies, [p.half() for p in params]))
    before = [p.clone() for p in params]
    lamb_steps.multi_tensor_lamb_mp(1, SET, lists, *settings, *clip)
    assert all(map(torch.equal, before, params))


@pytest.mark.parametrize("use_nvlamb", [False, True])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_two_stages_of_lamb_are_its_step(use_nvlamb, decay):
    params, moments = weights(), zeros(2)
    (updates,) = zeros()
    decays = torch.full((len(SHAPES),), decay)
    for step in range(STEPS):
        lists = [gradients(step), params, *moments, updates]
        norm, _ = multi.multi_tensor_l2norm(1, FLAG, lists[:1])
        settings = (decays, step, B1, B2, EPS, norm, 1.0)
        lamb_steps.multi_tensor_lamb_stage1_cuda(1, FLAG, lists, *settings)
        _, of_params = multi.multi_tensor_l2norm(1, FLAG, [params], True)
        _, of_updates = multi.multi_tensor_l2norm(1, FLAG, [updates], True)
        rates = (of_params, of_updates, LR, decay, use_nvlamb)
        lamb_steps.multi_tensor_lamb_stage2_cuda(1, FLAG, [params, updates], *rates)
    ratio = use_nvlamb or decay != 0
    expected = exact(parameters(), clipped(lamb(decay, decoupled=True, ratio=ratio), 1.0))
    assert distance(params, expected) <= bound(STEPS, 10 * LR)
