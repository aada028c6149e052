"""One of four workers: fused optimizers on a mesh of two by two; prints what it finds.

Numbers whose bits matter are printed as text that has them all.

Usage: optim_mesh_worker.py RANK STORE
"""

import gc
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from optim_cases import distance, make_params, set_grads
from optim_single_dtensors import same_bits, share, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD

RANK = int(sys.argv[1])
KINDS = {
    "SGD": (FusedSGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (FusedAdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "LAMB": (FusedLAMB, {"lr": 0.01, "weight_decay": 0.1}),
    "clipped AdamW": (FusedAdamW, {"lr": 0.01, "max_grad_norm": 0.5}),
    "clipped SGD": (FusedSGD, {"lr": 0.01, "momentum": 0.9, "max_grad_norm": 0.5}),
}
# Some placements leave processes with fewer elements than others, or none.
PLACED = [
    ((7, 5), (Shard(0), Shard(1))),
    ((5, 6), (Shard(0), Shard(0))),
    ((2, 3, 4), (Shard(2), Shard(0))),
    ((4099,), (Replicate(), Shard(0))),
    ((1, 4), (Shard(0), Replicate())),
    ((3,), (Replicate(), Replicate())),
    ((1,), (Shard(0), Shard(0))),
]


def beside_whole(ours, plain, shards, params):
    """Compares sharded parameters with whole ones; returns differences and replicas' values."""
    norms = [optimizer.grad_norm for optimizer in (ours, plain)]
    held = [p.to_local().detach().float().contiguous().numpy().tobytes() for p in shards]
    return {
        "same bits": same_bits(whole(shards), params),
        "distance": distance(whole(shards), params),
        "norms": [None if norm is None else norm.item().hex() for norm in norms],
        "held": [hashlib.sha256(part).hexdigest() for part in held],
    }


def by_hand(kind, dtype=torch.float32):
    """Uses gradients with a scale that is a power of two, so that not even roundings differ."""
    fused, options = KINDS[kind]
    params = make_params(dtype, shapes=[shape for shape, _ in PLACED])
    shards = [
        nn.Parameter(share(p.detach(), MESH, placed))
        for p, (_, placed) in zip(params, PLACED, strict=True)
    ]
    ours, plain = fused(shards, **options), fused(params, **options)
    for step in range(10):
        set_grads(step, params)
        for shard, param, (_, placed) in zip(shards, params, PLACED, strict=True):
            shard.grad = share(param.grad * 4, MESH, placed)
        ours.grad_scale = torch.tensor(4.0)
        ours.step()
        plain.step()
    return beside_whole(ours, plain, shards, params)


def model(how):
    """Builds `hybrid`: replicas of shards (HSDP); or `tensor`: columns and rows, then shards."""
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    shards = MESH
    if how == "tensor":
        shards = MESH["outer"]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        built = parallelize_module(built, MESH["inner"], plan)
    for layer in (built[0], built[2], built[4]):
        fully_shard(layer, mesh=shards)
    return fully_shard(built, mesh=shards)


def backward(module, step, how):
    """Gives the same batch to processes that share the parameters of a layer, or its columns."""
    number = RANK // 2 if how == "tensor" else RANK
    generator = torch.Generator().manual_seed(10 * step + number)
    inputs = torch.randn(16, 6, generator=generator)
    loss = (module(inputs) - inputs[:, :3].square()).square().mean()
    loss.backward()


def training(kind, how):
    """Trains parameters beside whole tensors with equal gradients, with a checkpoint in between."""
    fused, options = KINDS[kind]
    module = model(how)
    copies = [nn.Parameter(value) for value in whole(module.parameters())]
    ours, plain = fused(module.parameters(), **options), fused(copies, **options)
    for step in range(6):
        if step == 3:
            saved = get_optimizer_state_dict(module, ours)
            module.zero_grad()  # otherwise torch does not create the state to fill
            ours = fused(module.parameters(), **options | {"lr": 1.0})
            set_optimizer_state_dict(module, ours, saved)
        backward(module, step, how)
        for param, copy in zip(module.parameters(), copies, strict=True):
            copy.grad = param.grad.full_tensor()
        ours.step()
        plain.step()
        ours.zero_grad()
    return {
        **beside_whole(ours, plain, list(module.parameters()), copies),
        "placed": sorted({str(p.placements) for p in module.parameters()}),
    }


def main():
    found = {"by hand": {kind: by_hand(kind) for kind in KINDS}}
    found["half"] = by_hand("clipped AdamW", torch.bfloat16)
    for how in ("hybrid", "tensor"):
        found[how] = {kind: training(kind, how) for kind in ("AdamW", "LAMB", "clipped SGD")}
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=4)
    MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    print(json.dumps(main()))
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()
