"""One of two workers: mixed precision under DistributedDataParallel; prints what it ends with.

Usage: amp_ddp_worker.py RANK STORE
"""

import contextlib
import copy
import gc
import json
import sys

import torch
import torch.distributed as dist
from amp_models import Exact
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thalweg.compat  # noqa: F401
from thalweg import amp

RANK = int(sys.argv[1])
CLIP = 0.1


def setup(level, view=False, **options):
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return DistributedDataParallel(model, gradient_as_bucket_view=view), optimizer


def weights(module):
    return module.module.weight.tolist()


def inputs(first, second):
    """Gives rank 0 twice the mean and rank 1 nothing, so that averaging shows."""
    return torch.tensor([first * 2.0, second * 2.0]) * (1 - RANK)


def masters_of_other_seeds():
    torch.manual_seed(RANK)
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    initial = model.weight.tolist()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    module = DistributedDataParallel(model)
    shared = model.state_dict()["weight"].tolist()
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + RANK)
        loss = module(torch.randn(8, 4, generator=generator)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return {"initial": initial, "shared": shared, "end": model.state_dict()["weight"].tolist()}


def accumulation(level, view):
    module, optimizer = setup(level, view, loss_scale=64.0)
    for _ in range(2):
        optimizer.zero_grad()
        with (
            module.no_sync(),
            amp.scale_loss(module(inputs(1.0, 2.0)), optimizer, delay_unscale=True) as scaled,
        ):
            scaled.backward()
        with amp.scale_loss(module(inputs(1.0, 1.0)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return weights(module)


def two_backwards(level, view):
    module, optimizer = setup(level, view, loss_scale=64.0)
    for _ in range(2):
        optimizer.zero_grad()
        for values in ((1.0, 2.0), (1.0, 1.0)):
            with amp.scale_loss(module(inputs(*values)), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    return weights(module)


def beside_float32(level):
    """Trains in two parts a step with clipped gradients, and the same in float32 in one process.

    Returns how far apart both have ended, how far they have moved, and the norms at each step.
    """
    torch.manual_seed(5)
    start = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    theirs = optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    module = DistributedDataParallel(model)
    norms = []
    for _ in range(10):
        data = torch.randn(2, 2, 32, 8)  # two parts per rank
        optimizer.zero_grad()
        for part, context in enumerate((module.no_sync(), contextlib.nullcontext())):
            loss = (module(data[RANK, part]) - 1).square().mean() / 2
            with (
                context,
                amp.scale_loss(loss, optimizer, delay_unscale=part == 0) as scaled,
            ):
                scaled.backward()
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), CLIP)
        optimizer.step()
        theirs.zero_grad()
        (reference(data.view(-1, 8)) - 1).square().mean().backward()
        norms.append([norm.item(), nn.utils.clip_grad_norm_(reference.parameters(), CLIP).item()])
        theirs.step()
    ours, exact, begin = (
        nn.utils.parameters_to_vector(list(params)).detach()
        for params in (amp.master_params(optimizer), reference.parameters(), start.parameters())
    )
    apart, moved = (exact - ours).norm().item(), (exact - begin).norm().item()
    return {"apart": apart, "moved": moved, "norms": norms}


def overflow_of_one_worker():
    module, optimizer = setup("O2", loss_scale="dynamic")
    loss = module(inputs(float("inf"), 1.0) if RANK == 0 else inputs(0.0, 0.0))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return [weights(module), amp.state_dict()["loss_scaler0"]["loss_scale"]]


def aiak(hook, view):
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    torch.cuda.amp.aiak_amp_decorate(model, optimizer, loss_scale=64.0)
    module = DistributedDataParallel(model, gradient_as_bucket_view=view)
    if hook:
        module.register_comm_hook(None, fp16_compress_hook)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        with module.no_sync():
            scaler.scale(module(inputs(1.0, 2.0))).backward()
        scaler.scale(module(inputs(1.0, 1.0))).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(torch.cuda.amp.aiak_amp_parameters(optimizer), 1e6)
        scaler.step(optimizer)
        scaler.update()
    return [weights(module), norm.item()]


def main():
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    result = {"seeds": masters_of_other_seeds(), "overflow": overflow_of_one_worker()}
    for level in ("O1", "O2"):
        result[f"float32 {level}"] = beside_float32(level)
    for view in (False, True):
        for level in ("O1", "O2"):
            result[f"accumulation {level} {view}"] = accumulation(level, view)
            result[f"backwards {level} {view}"] = two_backwards(level, view)
        for hook in (False, True):
            result[f"aiak {hook} {view}"] = aiak(hook, view)
    # Gloo's threads end with the last reference to their group, and DDP's modules, which refer to
    # it, are in cycles. A thread that still releases a Python hook's future at interpreter exit
    # aborts the process.
    gc.collect()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
