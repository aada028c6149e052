"""One of two workers: fused optimizers on what FullyShardedDataParallel (FSDP1) makes of
parameters; prints what it finds.

Usage: optim_fsdp1_worker.py RANK STORE
"""

import functools
import gc
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD

RANK = int(sys.argv[1])
CPU = torch.device("cpu")


def sharded(use_orig_params):
    """Returns a model of 16 weights, 8 on each rank."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False), device_id=CPU, use_orig_params=use_orig_params
    )


def overflow(kind, use_orig_params=True):
    """Trains with an infinity in rank 1's shard, in steps 0 and 2 of 4.

    Returns the scales after each step, which steps have changed weights, and how many count.
    """
    model = sharded(use_orig_params)
    optimizer = kind(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    scales, changed = [], []
    for step in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if RANK == 1 and step % 2 == 0:
            next(model.parameters()).grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = [p.detach() for p in model.parameters()]
        changed.append(not all(map(torch.equal, before, after)))
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return [scales, changed, counts]


def refusal(make, use_orig_params=True, dtype=torch.float32):
    """Returns what the first step of `make(parameters)` says, and whether weights have changed."""
    model = sharded(use_orig_params).to(dtype)
    optimizer = make(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    else:
        text = ""
    return [text, not all(map(torch.equal, before, map(torch.detach, model.parameters())))]


def later_bound(params):
    optimizer = FusedSGD(params, lr=1.0)
    optimizer.step()  # there are no gradients yet
    optimizer.max_grad_norm = 1.0
    return optimizer


def main():
    clipping = functools.partial(FusedSGD, lr=1.0, max_grad_norm=1.0)
    ratios = functools.partial(FusedLAMB, weight_decay=0.1, max_grad_norm=None)
    kinds = (torch.optim.AdamW, FusedAdamW, FusedSGD)
    return {
        "overflow": {
            f"{kind.__name__} {flat}": overflow(kind, use_orig_params=not flat)
            for kind in kinds
            for flat in (False, True)
        },
        "norms": {
            "clipping": refusal(clipping),
            "clipping, flat": refusal(clipping, use_orig_params=False),
            "bound set later": refusal(later_bound),
            "LAMB": refusal(FusedLAMB),
            "LAMB without clipping, flat": refusal(ratios, use_orig_params=False),
            "LAMB, float64": refusal(FusedLAMB, dtype=torch.float64),
        },
        "no norms": refusal(functools.partial(FusedSGD, lr=1.0)),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    print(json.dumps(main()))
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()
