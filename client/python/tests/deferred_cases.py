"""Runs of mixed precision whose steps read gradients where backward has left them."""

import torch
from amp_models import Exact, backward, loss_of, network, setup

import thalweg.compat  # noqa: F401 - gives torch the names
from thalweg import amp
from thalweg.amp import _gradients
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

KINDS = [
    (FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (FusedAdamW, {"lr": 0.01, "amsgrad": True}),
    (FusedSGD, {"lr": 0.01, "momentum": 0.9, "maximize": True}),
    (FusedLAMB, {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.1}),
    (FusedSGD, {"lr": 0.01, "max_grad_norm": 0.1}),
]
IDS = [kind.__name__ for kind, _ in KINDS]


def note_calls(monkeypatch):
    """The functions that make gradients of masters from now on, and of how many."""
    found = []

    def note(name):
        original = getattr(_gradients, name)

        def noting(grads, *rest):
            found.append((name, len(grads)))
            return original(grads, *rest)

        monkeypatch.setattr(_gradients, name, noting)

    for name in ("gather", "gather_unscaled", "gather_divided"):
        note(name)
    return found


def do_nothing(model, optimizer):
    pass


def look(model, optimizer):
    assert any(master.grad is not None for master in amp.master_params(optimizer))


def train_apex(model, optimizer, steps, before_step=do_nothing):
    for number in steps:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
            scaled.backward()
        before_step(model, optimizer)
        optimizer.step()


def train_native(model, optimizer, steps, before_step=do_nothing):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    # Hooks of a step are all that comes between the scaler's look and the step.
    handle = optimizer.register_step_pre_hook(lambda *_: before_step(model, optimizer))
    for number in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.remove()


def train_without_scale(model, optimizer, steps, before_step=do_nothing):
    handle = optimizer.register_step_pre_hook(lambda *_: before_step(model, optimizer))
    for number in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
    handle.remove()


def open_apex(kind, options, **more):
    model = network()
    optimizer = kind(model.parameters(), **options)
    setup(model, optimizer, "O2", **{"loss_scale": "dynamic", **more})
    return model, optimizer


def open_native(kind, options):
    model = network()
    optimizer = kind(model.parameters(), **options)
    return torch.cuda.amp.aiak_amp_decorate(model, optimizer, loss_scale=256.0)


WAYS = {
    "scale_loss": (open_apex, train_apex),
    "bfloat16": (
        lambda kind, options: open_apex(kind, options, half_dtype=torch.bfloat16, loss_scale=1.0),
        train_apex,
    ),
    "GradScaler": (open_native, train_native),
    "no scale": (open_native, train_without_scale),
}


def bits(model, optimizer):
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    found = [*model.parameters(), *amp.master_params(optimizer), *state]
    return [tensor.detach().clone() for tensor in found]


def deferred(kind=FusedSGD, values=(1.0, 2.0), lr=0.25, **options):
    """An Exact whose next gradients are deferred."""
    model = Exact(values)
    optimizer = kind(model.parameters(), lr=lr)
    setup(model, optimizer, "O2", **{"loss_scale": 128.0} | options)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler.load_state_dict({"loss_scale": 128.0, "unskipped": 0})
    backward(model, optimizer, [0.0, 0.0])
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
