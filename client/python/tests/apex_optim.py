"""Parameters, gradients and runs that the tests of apex's optimizers share."""

import torch
from torch import nn

SHAPES = [(7, 5), (3,), (1,), (2, 3, 4)]
STEPS = 5
LR = 0.01


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def gradient(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(SHAPES[index], generator=generator)


def set_grads(params, step, scale=1.0):
    for index, param in enumerate(params):
        param.grad = (scale * gradient(step, index)).to(param.dtype)


def run(optimizer, params, steps=range(STEPS)):
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def exact(params, update):
    """Applies `update(state, weight, gradient, step)`, which returns weights, in float64."""
    weights = [param.detach().double() for param in params]
    states = [{} for _ in weights]
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weights[i] = update(states[i], weight, gradient(step, i).double(), step + 1)
    return weights
