"""Tests LAMB against its formulas in float64, and the contract of torch's optimizers."""

import copy
import math

import pytest
import torch
from torch import nn, optim

from thalweg.compat._apex_optimizers import FusedAdam, FusedLAMB
from thalweg.optim import LAMB

pytestmark = pytest.mark.numeric

SHAPES = [(7, 5), (3,), (1,), (2, 3, 4)]


def reference(params, grads, steps, *, lr, weight_decay, betas, eps, adam_w_mode=True,
              grad_averaging=True, max_grad_norm=1.0, bias_correction=True,
              use_nvlamb=False, trust=True):  # fmt: skip
    """Computes the formulas, one tensor at a time, in float64. `grads(step, i)` gives gradients."""
    weights = [p.detach().double().clone() for p in params]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step in range(1, steps + 1):
        now = [grads(step, i).double() for i in range(len(weights))]
        norm = math.sqrt(sum(float((g * g).sum()) for g in now))
        clip = norm / max_grad_norm if max_grad_norm and norm > max_grad_norm else 1.0
        for i, w in enumerate(weights):
            g = now[i] / clip
            if not adam_w_mode:
                g = g + weight_decay * w
            first[i] = betas[0] * first[i] + (1 - betas[0] if grad_averaging else 1) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            c1 = 1 - betas[0] ** step if bias_correction else 1
            c2 = 1 - betas[1] ** step if bias_correction else 1
            u = (first[i] / c1) / ((second[i] / c2).sqrt() + eps)
            if adam_w_mode:
                u = u + weight_decay * w
            ratio = 1.0
            if trust and (use_nvlamb or weight_decay != 0) and w.norm() != 0 and u.norm() != 0:
                ratio = float(w.norm() / u.norm())
            weights[i] = w - lr * ratio * u
    return weights


def gradient(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(SHAPES[index], generator=generator)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    with torch.no_grad():
        params[2].zero_()  # a norm of 0
    return params


def run(optimizer, params, steps):
    for step in steps:
        for index, param in enumerate(params):
            param.grad = gradient(step, index).to(param.dtype)
        optimizer.step()


BASE = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
OPTIONS = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"weight_decay": 0.1, "adam_w_mode": False},
    {"weight_decay": 0.1, "grad_averaging": False},
    {"weight_decay": 0.1, "max_grad_norm": None},
    {"weight_decay": 0.1, "max_grad_norm": 0.0},
    {"weight_decay": 0.1, "max_grad_norm": 1e9},
    {"weight_decay": 0.1, "bias_correction": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_weights_follow_the_formulas(options):
    """200 steps of size lr·r·|u|; each adds a few roundings of 2⁻²⁴, relative to w and to lr·r·u.

    |w| and its ratio stay below 16 here, |u| below 8: 200·(4·2⁻²⁴·16 + 20·2⁻²⁴·0.01·16·8) < 2e-3.
    Measured errors are a hundred times smaller, so a tenth of the bound is asked for.
    """
    params = parameters()
    expected = reference(params, gradient, 200, **BASE | {"max_grad_norm": 1.0} | options)
    optimizer = LAMB(params, **BASE | options)
    run(optimizer, params, range(1, 201))
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, rtol=0, atol=2e-4)


def bound(steps, *, lr, update, roundings=1):
    """Returns how far weights in float32 may be from those in float64 after so many steps.

    Each step rounds the weight so often; it stays below 4, where a rounding is at most 2⁻²³. What
    is subtracted, at most lr·update, has at most 60 roundings of 2⁻²⁴ of it: each step adds two to
    the first moment, of which β1 = 0.9 keeps ten steps', so 20; and three to the second, of which
    the root keeps half, in 20 steps 30; factors, root, division and ratio have the other ten.
    """
    return steps * (roundings * 2.0**-23 + 60 * 2.0**-24 * lr * update)


def test_default_is_adam_with_clipping():
    """|u| is below 2 in these steps, and the one addition to the weight rounds it: 7e-7."""
    params = parameters()
    expected = reference(params, gradient, 5, lr=1e-3, weight_decay=0, betas=(0.9, 0.999), eps=1e-8)
    run(LAMB(params), params, range(1, 6))
    largest = bound(5, lr=1e-3, update=2)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, rtol=0, atol=largest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_updated_in_float32_and_rounded_once(dtype):
    params = parameters(dtype)
    whole = [nn.Parameter(param.detach().float()) for param in params]
    for group in (params, whole):
        for index, param in enumerate(group):
            param.grad = gradient(1, index).to(dtype).to(param.dtype)
    optimizer = LAMB(params, weight_decay=0.1)
    optimizer.step()
    LAMB(whole, weight_decay=0.1).step()
    for param, reference_param in zip(params, whole, strict=True):
        assert torch.equal(param.detach(), reference_param.detach().to(dtype))
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("options", [{"adam_w_mode": True}, {"adam_w_mode": False},
                                     {"bias_correction": False}])  # fmt: skip
def test_fused_adam_of_apex_follows_the_formulas(options):
    """|u| is at most √(Σₖ (1-β1)²β1²ᵏ / ((1-β2)β2ᵏ)) = 2.4, by Cauchy and Schwarz. Three operations
    round the weight: the factor for its decay, the product with that, the sum. Together 9e-6.
    """
    params = parameters()
    expected = reference(
        params, gradient, 20, **BASE | options, weight_decay=0.1, max_grad_norm=None, trust=False
    )
    run(FusedAdam(params, **BASE | options, weight_decay=0.1), params, range(1, 21))
    largest = bound(20, lr=BASE["lr"], update=2.4, roundings=3)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, rtol=0, atol=largest)


def test_fused_lamb_of_apex_has_its_defaults():
    """|u| is below 2 in these steps, and the ratio below 4: 8e-7."""
    params = parameters()
    expected = reference(
        params, gradient, 5, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-6
    )
    run(FusedLAMB(params, 1e-3, True), params, range(1, 6))
    largest = bound(5, lr=1e-3, update=4 * 2)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), weight, rtol=0, atol=largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(dtype):
    params = parameters(dtype)
    optimizer = LAMB(params, weight_decay=0.1)
    run(optimizer, params, range(1, 4))
    saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in params]))
    run(optimizer, params, range(4, 7))
    others = [nn.Parameter(value) for value in saved[1]]
    resumed = LAMB(others, weight_decay=0.5)
    resumed.load_state_dict(saved[0])
    run(resumed, others, range(4, 7))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        for key, moment in optimizer.state[param].items():
            assert moment.dtype is torch.float32
            assert torch.equal(resumed.state[other][key], moment)


def test_state_goes_to_adam_and_back():
    params = parameters()
    optimizer = LAMB(params)
    run(optimizer, params, range(1, 3))
    adam = optim.Adam(params)
    adam.load_state_dict({**adam.state_dict(), "state": optimizer.state_dict()["state"]})
    run(adam, params, range(3, 4))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": adam.state_dict()["state"]})
    run(optimizer, params, range(4, 5))
    assert float(optimizer.state[params[0]]["step"]) == 4.0


def test_gradients_are_left_as_they_are():
    params = parameters()
    run(LAMB(params, weight_decay=0.1), params, range(1, 2))
    for index, param in enumerate(params):
        assert torch.equal(param.grad, gradient(1, index))


def test_parameters_without_gradient_do_not_advance():
    params = parameters()
    optimizer = LAMB(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert list(optimizer.state) == [params[0]]
    optimizer.zero_grad()
    assert params[0].grad is None
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 1.0


def test_clipping_takes_the_norm_over_all_groups():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = LAMB([{"params": [a]}, {"params": [b], "max_grad_norm": 10.0}], betas=(0.0, 0.0))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert optimizer.state[a]["exp_avg"].item() == pytest.approx(0.6, rel=1e-6)
    assert optimizer.state[b]["exp_avg"].item() == 4.0  # its own bound


def test_contract_of_torch_is_kept():
    params = parameters()
    optimizer = LAMB(params, lr=torch.tensor(0.1), maximize=True, set_grad_none=False)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = params[0].detach().clone()

    def closure():
        loss = params[0].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before.sum().item())
    assert (params[0] > before).all()  # ascends
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    optimizer.zero_grad()
    assert params[0].grad.count_nonzero() == 0
    late = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(1)
    optimizer.step()
    assert late.item() != 0
    assert copy.deepcopy(optimizer).param_groups[1]["lr"] == 1.0


def test_what_is_not_finite_passes_through():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([float("nan"), 1.0])
    LAMB([param]).step()
    assert param.isnan().all()  # the norm is not finite


def test_malformed_arguments_and_sparse_gradients_are_refused():
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="lr is -1"):
        LAMB([param], lr=-1)
    with pytest.raises(ValueError, match="betas are"):
        LAMB([param], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="FusedAdam has no amsgrad"):
        FusedAdam([param], amsgrad=True)
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="has a sparse gradient, expected a dense one"):
        LAMB([param]).step()
