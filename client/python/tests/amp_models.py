"""Models and loops that the tests of mixed precision share."""

import contextlib
import os

import torch
from torch import nn, optim

from thalweg import amp

# The largest relative error of rounding to nearest: half the distance from 1 to the next number.
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@contextlib.contextmanager
def casts_off_afterwards():
    """Checks that torch's functions are restored, whatever happens within."""
    try:
        yield
    finally:
        amp.init(enabled=False)
        amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batch(seed, size=32):
    generator = torch.Generator().manual_seed(1000 + seed)
    inputs = torch.randn(size, 8, generator=generator)
    return inputs, torch.randint(4, (size,), generator=generator)


def loss_of(model, seed):
    inputs, labels = batch(seed)
    return nn.functional.cross_entropy(model(inputs), labels)


def train(model, optimizer, steps, loss_id=0):
    """Takes a step with the batch of each number; returns the losses."""
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Exact(nn.Module):
    """y = w·x with gradients that are exact in every type: dy/dw = x for integers x."""

    def __init__(self, values=(1.0, 2.0)):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self, inputs):
        return (self.weight * inputs).sum()


def backward(model, optimizer, inputs, **options):
    """One scaled backward of an Exact; an input of infinity makes it overflow."""
    loss = model(torch.tensor(inputs))
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def script_environment():
    """Returns the environment of a script that is started without any of our variables."""
    ours = ("THALWEG_", "AIAK_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def setup(model, optimizer, level, **options):
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def exact(level="O2", lr=0.25, **options):
    """Starts at a scale that small integers survive in float16."""
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=lr)
    setup(model, optimizer, level, **{"loss_scale": 128.0} | options)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 0})
    return model, optimizer
