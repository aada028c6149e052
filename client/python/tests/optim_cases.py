"""Parameters, gradients and references that the tests of the fused optimizers share."""

import torch

SHAPES = ((1,), (7,), (33, 5), (2, 3, 4, 5), (4099,), (0,), ())


def make_params(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def copy_of(params, dtype=None):
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def set_grads(seed, *lists):
    """The same gradients for all lists, rounded to the first's type, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for group in zip(*lists, strict=True):
        scale = 10.0 ** torch.randint(-3, 1, (), generator=generator).item()
        grad = torch.randn(group[0].shape, generator=generator) * scale
        for param in group:
            param.grad = grad.to(group[0].dtype).to(param.dtype, copy=True)


def bound(steps, lr, size=6.0):
    """How far float32 may be from float64 after `steps`.

    Each step rounds the parameter, whose size is at most `size`, once or twice (decay), by 2^-24
    of it each, and moves it by at most about 4·lr (gradients whose size does not change between
    steps), with an error of some tens of roundings of that: moments, square root, divisions.
    """
    return steps * 2.0**-24 * (2 * size + 40 * 4 * lr)


def distance(ours, reference):
    """Largest difference of any element; NaN if there is one."""
    return max(
        ((a.detach().double() - b.detach().double()).abs().max().item())
        for a, b in zip(ours, reference, strict=True)
        if a.numel()
    )
