"""Provides parameters, gradients and references for the tests of the fused optimizers."""

import torch
from amp_models import casts_off_afterwards

from thalweg import amp
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

SHAPES = ((1,), (7,), (33, 5), (2, 3, 4, 5), (4099,), (0,), ())

# Each case is an optimizer with options that affect its arithmetic.
CASES = [
    (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (FusedAdamW, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    (FusedSGD, {"lr": 1e-2}),
    (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    (FusedLAMB, {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e-3}),
    (FusedLAMB, {"lr": 1e-2, "max_grad_norm": None, "grad_averaging": False}),
    (FusedAdamW, {"lr": 1e-2, "max_grad_norm": 1.0}),
    (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "maximize": True, "max_grad_norm": 1.0}),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_params(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def copy_of(params, dtype=None):
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def set_grads(seed, *lists):
    """Sets the same gradients for all lists, rounded to the first's type, of many sizes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for group in zip(*lists, strict=True):
        scale = 10.0 ** torch.randint(-3, 1, (), generator=generator).item()
        grad = torch.randn(group[0].shape, generator=generator) * scale
        for param in group:
            param.grad = grad.to(group[0].dtype).to(param.dtype, copy=True)


def bound(steps, lr, size=6.0):
    """Returns the largest difference between float32 and float64 after `steps`.

    Each step rounds the parameter, whose size is at most `size`, once or twice (decay), by 2^-24 of
    it each, and moves it by at most about 4·lr (gradients whose size does not change between
    steps), with an error of some tens of roundings of that: moments, square root, divisions.
    """
    return steps * 2.0**-24 * (2 * size + 40 * 4 * lr)


def distance(ours, reference):
    """Returns the largest difference of any element; NaN if there is one."""
    return max(
        ((a.detach().double() - b.detach().double()).abs().max().item())
        for a, b in zip(ours, reference, strict=True)
        if a.numel()
    )


def train_with_skips(params, kind, options, device):
    """Takes four steps of copies of `params`, the second skipped; returns params and state."""
    ours = [torch.nn.Parameter(p.detach().to(device, copy=True)) for p in params]
    groups = [{"params": ours[:3]}, {"params": ours[3:], "lr": 3e-3}]
    optimizer = kind(groups, **options)
    sources = copy_of(params)
    for step in range(4):
        set_grads(step, sources)
        for source, param in zip(sources, ours, strict=True):
            param.grad = (source.grad * 8).to(device)
        if step < 3:
            ours[1].grad = None  # gets its first gradient later
        optimizer.grad_scale = torch.tensor([8.0], device=device)
        optimizer.found_inf = torch.tensor(float(step == 1), device=device)
        optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in (*ours, *kept)]


def train_mixed(kind, options, device):
    """Takes five O2 steps, the third skipped for an infinity; returns model, masters and state."""
    sources = make_params()
    params = [torch.nn.Parameter(p.detach().to(device, copy=True)) for p in sources]
    optimizer = kind(params, **options)
    with casts_off_afterwards():
        amp.initialize(torch.nn.ParameterList(params), optimizer, opt_level="O2", verbosity=0)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
        for step in range(5):
            set_grads(step, sources)
            if step == 2:
                sources[1].grad[0] = float("inf")
            with amp.scale_loss(torch.zeros((), device=device), optimizer):
                scale = 8.0 if step <= 2 else 4.0
                for source, param in zip(sources, params, strict=True):
                    param.grad = (source.grad * scale).half().to(device)
            optimizer.step()
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
        kept = [value for state in optimizer.state.values() for value in state.values()]
        kept.extend(amp.master_params(optimizer))
    return [tensor.detach().cpu() for tensor in (*params, *kept)]
