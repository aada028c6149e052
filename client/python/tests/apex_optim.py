"""Parameters, gradients and runs that the tests of apex's optimizers share."""

import torch
from torch import nn

SHAPES = [(7, 5), (3,), (1,), (2, 3, 4)]
STEPS = 5
LR = 0.01
ADAM = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-6}


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


def novograd(betas, decay, *, inside, averaging, infinite, zero, corrected):
    def update(state, p, g, t):
        n = g.abs().max() if infinite else g.norm()
        v = state.get("v", torch.zeros_like(n) if zero else n)
        b1, b2 = betas
        v = b2 * v + (1 - b2) * n if infinite else (b2 * v**2 + (1 - b2) * n**2).sqrt()
        c1, c2 = (1 - b1**t, (1 - b2**t) ** 0.5) if corrected else (1, 1)
        state["v"] = v
        share = 1 - b1 if averaging else 1
        if inside:
            g = g / (v / c2 + 1e-8) + decay * p
        state["m"] = m = b1 * state.get("m", 0) + share * g
        return p - LR * (m / c1 if inside else m / c1 / (v / c2 + 1e-8) + decay * p)

    return update


def adagrad(decay, *, decoupled):
    def update(state, p, g, _):
        g = g if decoupled else g + decay * p
        state["h"] = h = state.get("h", 0) + g * g
        return p - LR * (g / (h.sqrt() + 1e-10) + (decay * p if decoupled else 0))

    return update


def adam(decay, *, decoupled):
    def update(state, p, g, t):
        u = adam_update(state, g if decoupled else g + decay * p, t)
        return p - LR * (u + decay * p if decoupled else u)

    return update


def lamb(decay, *, decoupled, ratio=True):
    """`gradient` is given clipped."""

    def update(state, p, g, t):
        u = adam_update(state, g if decoupled else g + decay * p, t)
        u = u + decay * p if decoupled else u
        return p - LR * (p.norm() / u.norm() if ratio else 1) * u

    return update


def adam_update(state, g, t):
    b1, b2 = ADAM["betas"]
    state["m"] = m = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", 0) + (1 - b2) * g * g
    return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + ADAM["eps"])
