"""One of two workers: fused optimizers on DTensors; prints what it finds.

Usage: optim_sharded_worker.py RANK STORE
"""

import gc
import json
import sys

import optim_single_dtensors
import torch
import torch.distributed as dist
from optim_cases import distance, make_params, set_grads
from optim_single_dtensors import same_bits, share, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from thalweg.compat._apex_optimizers import FusedAdam as ApexAdam
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD, fallbacks, fused_steps

RANK = int(sys.argv[1])
# With two processes the second gets fewer elements of these, or none.
SHAPES = ((7, 5), (1, 4), (2, 3, 4), (4099,), (1,), (0,))
KINDS = {
    "SGD": (FusedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (FusedAdam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (FusedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "apex": (ApexAdam, None, {"lr": 0.01, "weight_decay": 0.1}),
    "LAMB": (FusedLAMB, None, {"lr": 0.01, "weight_decay": 0.1}),
    "nvlamb": (FusedLAMB, None, {"lr": 0.01, "use_nvlamb": True, "max_grad_norm": 0.5}),
}


def placement(index):
    """Replicates the last but two; the others are sharded."""
    return [Replicate()] if index == len(SHAPES) - 3 else [Shard(0)]


def spread(params):
    """Returns DTensors with the values of `params`."""
    return [nn.Parameter(share(p.detach(), MESH, placement(i))) for i, p in enumerate(params)]


def spread_grads(params, sources):
    for index, (param, source) in enumerate(zip(params, sources, strict=True)):
        param.grad = share(source.grad, MESH, placement(index))


def by_hand(kind, dtype=torch.float32):
    """Returns whether shards equal whole tensors, their distance from torch's, and the state."""
    fused, peer, options = KINDS[kind]
    params = make_params(dtype, shapes=SHAPES)
    shards = spread(params)
    ours, plain = fused(shards, **options), fused(params, **options)
    others = spread(params)
    theirs = peer(others, **options) if peer and dtype is torch.float32 else None
    for step in range(10):
        set_grads(step, params)
        spread_grads(shards, params)
        ours.step()
        plain.step()
        if theirs:
            spread_grads(others, params)
            theirs.step()
    moments = [v for p in shards for k, v in ours.state[p].items() if k != "step"]
    return {
        "same bits": same_bits(whole(shards), params),
        "distance": distance(whole(shards), params),
        "from torch": distance(whole(shards), whole(others)) if theirs else 0.0,
        "moments": sorted({str((type(m).__name__, str(m.dtype))) for m in moments}),
        "placed": all(
            v.placements == p.placements
            for p in shards
            for k, v in ours.state[p].items()
            if k != "step"
        ),
        "values": [value.double().sum().item() for value in whole(shards)],
    }


def model():
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 1))
    for layer in built:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=MESH)
    return fully_shard(built, mesh=MESH)


def backward(module, step, scale=1.0):
    generator = torch.Generator().manual_seed(10 * step + RANK)
    inputs = torch.randn(16, 5, generator=generator)
    loss = (module(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    (loss * scale).backward()
    return loss.item()


def training(kind):
    """Trains fully_shard()ed parameters beside whole tensors with the same gradients."""
    fused, _, options = KINDS[kind]
    module = model()
    copies = [nn.Parameter(value) for value in whole(module.parameters())]
    ours, plain = fused(module.parameters(), **options), fused(copies, **options)
    losses = []
    for step in range(15):
        losses.append(backward(module, step))
        for param, copy in zip(module.parameters(), copies, strict=True):
            copy.grad = param.grad.full_tensor()
        ours.step()
        plain.step()
        ours.zero_grad()
    shards = whole(module.parameters())
    return {
        "same bits": same_bits(shards, copies),
        "distance": distance(shards, copies),
        "learns": sum(losses[-5:]) < sum(losses[:5]),
    }


def train(module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()


def checkpoints(full):
    """Exchanges checkpoints with torch's by torch.distributed.checkpoint, beside torch's alone."""
    fused, peer, options = KINDS["AdamW"]
    how = StateDictOptions(full_state_dict=full)
    module, reference = model(), model()
    ours, theirs = fused(module.parameters(), **options), peer(reference.parameters(), **options)
    before = whole(module.parameters())
    fresh = get_optimizer_state_dict(module, ours, options=how)  # takes a step with lr 0
    unchanged = same_bits(whole(module.parameters()), before)
    same_keys = fresh.keys() == get_optimizer_state_dict(reference, theirs, options=how).keys()
    train(reference, theirs, range(9))
    optimizer = ours
    for index, kind in enumerate((fused, peer, fused)):
        if index:
            saved = get_optimizer_state_dict(module, optimizer, options=how)
            module.zero_grad()  # otherwise torch does not create the state to fill
            optimizer = kind(module.parameters(), **options | {"lr": 1.0})
            set_optimizer_state_dict(module, optimizer, saved, options=how)
        train(module, optimizer, range(3 * index, 3 * index + 3))
    return {
        "unchanged": unchanged,
        "same keys": same_keys,
        "distance": distance(whole(module.parameters()), whole(reference.parameters())),
        "steps": [int(s["step"]) for s in optimizer.state.values()],
        "steps of torch": [int(s["step"]) for s in theirs.state.values()],
    }


def resumed(kind):
    """Resumes from state_dict() in mid-run, beside a run that was not interrupted."""
    fused, _, options = KINDS[kind]
    module, other = model(), model()
    straight = fused(module.parameters(), **options)
    train(module, straight, range(3))
    with torch.no_grad():
        for target, source in zip(other.parameters(), module.parameters(), strict=True):
            target.copy_(source)
    second = fused(other.parameters(), **options)
    second.load_state_dict(straight.state_dict())
    train(module, straight, range(3, 6))
    train(other, second, range(3, 6))
    return same_bits(whole(module.parameters()), whole(other.parameters()))


def overflow(kind):
    """Checks that an infinity in one process skips all steps, and that scales leave no trace."""
    fused, _, options = KINDS[kind]
    module, other = model(), model()
    scaled, plain = fused(module.parameters(), **options), fused(other.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # creates its state
    for step in range(4):
        scaled.zero_grad()
        plain.zero_grad()
        backward(module, step, scaler.get_scale())
        if step == 1:
            if RANK == 1:
                next(module.parameters()).grad.to_local().view(-1)[0] = torch.inf
        else:
            backward(other, step)
            plain.step()
        scaler.step(scaled)
        scaler.update()
    return [
        same_bits(whole(module.parameters()), whole(other.parameters())),
        scaler.get_scale(),
        sorted({int(s["step"]) for s in scaled.state.values() if "step" in s}),
    ]


def without_code():
    """Runs torch's AdamW fused by the environment; it changes torch, and therefore comes last."""
    from thalweg._activation import _fused_optimizers

    params = make_params(shapes=SHAPES)
    ours, theirs = spread(params), spread(params)
    _fused_optimizers.activate()
    optimizers = [FusedAdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)]
    for step in range(3):
        set_grads(step, params)
        for lists, optimizer in zip((ours, theirs), optimizers, strict=True):
            spread_grads(lists, params)
            optimizer.step()
    return [same_bits(whole(ours), whole(theirs)), fused_steps["AdamW"]]


def main():
    half = by_hand("AdamW", torch.bfloat16)
    return {
        "by hand": {kind: by_hand(kind) for kind in KINDS},
        "half": half,
        "half LAMB": by_hand("LAMB", torch.bfloat16),
        "training": {kind: training(kind) for kind in ("SGD", "Adam", "AdamW", "LAMB")},
        "fallbacks": sorted(fallbacks),
        "checkpoints": [checkpoints(full) for full in (False, True)],
        "resumed": {kind: resumed(kind) for kind in ("SGD", "AdamW", "LAMB")},
        "overflow": {kind: overflow(kind) for kind in ("SGD", "AdamW", "LAMB")},
        **optim_single_dtensors.checks(MESH),
        "without code": without_code(),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    MESH = init_device_mesh("cpu", (2,))
    print(json.dumps(main()))
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()
