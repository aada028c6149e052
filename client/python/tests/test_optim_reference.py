"""Compares fused optimizers with torch's in float64, and LAMB with its formulas in float64."""

import math

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

pytestmark = pytest.mark.numeric

STEPS = 200
ADAM = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.4, 0.9), "eps": 1e-3},
    {"lr": torch.tensor(3e-3)},
]
SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.5, "maximize": True},
]
CASES = [
    *((FusedAdam, torch.optim.Adam, options) for options in ADAM),
    *((FusedAdamW, torch.optim.AdamW, options) for options in ADAM),
    *((FusedSGD, torch.optim.SGD, options) for options in SGD),
]


@pytest.mark.parametrize(("fused", "kind", "options"), CASES)
def test_float32_follows_float64(fused, kind, options):
    options = {"lr": 1e-2, **options}
    params = make_params()
    reference = copy_of(params, torch.float64)
    ours, theirs = fused(params, **options), kind(reference, foreach=False, **options)
    for step in range(STEPS):
        set_grads(step, params, reference)
        ours.step()
        theirs.step()
    size = max(p.abs().max().item() for p in reference if p.numel())
    # SGD moves by lr times gradients of up to 5, ten times that with momentum.
    lr = 1e-2 * (15 if kind is torch.optim.SGD else 1)
    assert distance(params, reference) <= bound(STEPS, lr, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fused", "kind", "options"), CASES)
def test_half_parameters_are_those_of_float64_rounded(fused, kind, options, dtype):
    options = {"lr": 1e-2, **options}
    params = make_params(dtype)
    reference = copy_of(params, torch.float64)
    ours, theirs = fused(params, **options), kind(reference, foreach=False, **options)
    lr = 1e-2 * (15 if kind is torch.optim.SGD else 1)
    # Few steps: the reference follows in each, so that what a late one does, an early one does too.
    for step in range(STEPS // 4):
        set_grads(step, params, reference)
        ours.step()
        theirs.step()
        exact = bound(step + 1, lr, max(p.abs().max().item() for p in reference if p.numel()))
        for param, expected in zip(params, reference, strict=True):
            difference = (param.double() - expected).detach().abs()
            # Rounding to nearest is off by half a unit, and below the smallest normal number by
            # half of its unit.
            size = param.detach().double().abs().clamp_min(torch.finfo(dtype).smallest_normal)
            assert (difference <= torch.finfo(dtype).eps / 2 * size + exact).all()
            expected.data.copy_(param)


def lamb_step(params, states, step, *, lr, decay, nvlamb, averaging, clip, l2, maximize):
    """Computes the formulas of docs/optim.md on float64 tensors."""
    grads = [-p.grad if maximize else p.grad for p in params]
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
    if clip and norm > clip:
        grads = [g / (norm / clip) for g in grads]
    for p, g, state in zip(params, grads, states, strict=True):
        if l2:
            g = g + decay * p  # noqa: PLW2901
        state[0] = 0.9 * state[0] + (0.1 if averaging else 1.0) * g
        state[1] = 0.999 * state[1] + 0.001 * g * g
        u = (state[0] / (1 - 0.9**step)) / ((state[1] / (1 - 0.999**step)).sqrt() + 1e-8)
        if not l2:
            u = u + decay * p
        ratio = 1.0
        if (nvlamb or decay != 0) and p.norm() != 0 and u.norm() != 0:
            ratio = float(p.norm() / u.norm())
        p.data = p.data - lr * ratio * u


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"use_nvlamb": True},
        {"weight_decay": 0.1, "adam_w_mode": False},
        {"weight_decay": 0.1, "grad_averaging": False, "maximize": True},
        {"weight_decay": 0.1, "max_grad_norm": None},
        {"weight_decay": 0.1, "max_grad_norm": 1e9},
    ],
)
@torch.no_grad()
def test_lamb_follows_its_formulas(options):
    params = make_params()
    params[1].zero_()  # without a norm: no trust ratio in the first step
    reference = copy_of(params, torch.float64)
    ours = FusedLAMB(params, lr=1e-2, **options)
    states = [[torch.zeros_like(p), torch.zeros_like(p)] for p in reference]
    for step in range(STEPS):
        set_grads(step, params, reference)
        ours.step()
        lamb_step(
            reference,
            states,
            step + 1,
            lr=1e-2,
            decay=options.get("weight_decay", 0),
            nvlamb=options.get("use_nvlamb", False),
            averaging=options.get("grad_averaging", True),
            clip=options.get("max_grad_norm", 1),
            l2=not options.get("adam_w_mode", True),
            maximize=options.get("maximize", False),
        )
    size = max(p.abs().max().item() for p in reference if p.numel())
    # Errors of parameters grow with them here: by lr in each step, e² times in 200.
    assert distance(params, reference) <= math.e**2 * bound(STEPS, 1e-2 * size, size)


def odd_views():
    """Returns parameters whose elements are not contiguous from an aligned address on."""
    base = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    images = base[:120].view(2, 3, 4, 5).clone(memory_format=torch.channels_last)
    matrix = base[3000:3120].view(10, 12)
    return [torch.nn.Parameter(v) for v in (base[1:1000], base[1001:3000:2], images, matrix.t())]


@pytest.mark.parametrize(
    ("fused", "kind"), [(FusedAdamW, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_parameters_and_gradients_may_lie_anyhow(fused, kind, turned):
    options = {"momentum": 0.9} if fused is FusedSGD else {}
    params = odd_views()
    reference = [torch.nn.Parameter(p.detach().double().clone()) for p in params]
    ours, theirs = fused(params, lr=1e-2, **options), kind(reference, lr=1e-2, **options)
    for step in range(20):
        set_grads(step, params, reference)
        if turned:
            for param in params:
                axes = list(reversed(range(param.dim())))
                param.grad = param.grad.permute(axes).contiguous().permute(axes)
        ours.step()
        theirs.step()
    lr = 1e-2 * (15 if fused is FusedSGD else 1)
    assert distance(params, reference) <= bound(20, lr)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_lamb_gives_the_same_bits_with_any_number_of_threads(options):
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            params = make_params(shapes=((100_003,), (17,), (50_000,)))
            optimizer = FusedLAMB(params, lr=1e-2, **options)
            for step in range(5):
                set_grads(step, params)
                optimizer.step()
            results.append([p.detach().clone() for p in params])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
