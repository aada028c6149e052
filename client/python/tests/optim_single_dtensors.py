"""Checks fused optimizers on DTensors, one at a time, whose mesh is of two workers."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD


def share(tensor, mesh, placements):
    """Every process has the whole tensor and takes its part; nothing is sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def whole(params):
    return [p.full_tensor().detach() for p in params]


def same_bits(ours, others):
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(ours, others, strict=True))


def gradient_that_is_placed_otherwise(mesh):
    param = nn.Parameter(share(torch.zeros(3), mesh, [Replicate()]))
    param.grad = share(torch.arange(3.0), mesh, [Shard(0)])
    FusedSGD([param], lr=1.0).step()
    return param.to_local().tolist()


def memory_that_moves(mesh):
    param = nn.Parameter(share(torch.zeros(4), mesh, [Shard(0)]))
    optimizer = FusedSGD([param], lr=1.0)
    for _ in range(2):
        param.grad = share(torch.ones(4), mesh, [Shard(0)])
        optimizer.step()
        param._local_tensor = param._local_tensor.clone()
    return param.full_tensor().tolist()


def gradients_are_freed(mesh):
    param = nn.Parameter(share(torch.zeros(4), mesh, [Shard(0)]))
    optimizer = FusedSGD([param], lr=1.0)
    param.grad = share(torch.ones(4), mesh, [Shard(0)])
    grad = StorageWeakRef(param.grad.to_local().untyped_storage())
    optimizer.step()
    kept = not grad.expired()
    optimizer.zero_grad()
    return [kept, grad.expired()]


def refusal(action):
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def writing_is_noticed(mesh, kind):
    param = nn.Parameter(share(torch.ones(4), mesh, [Replicate()]))
    optimizer = kind([param], lr=0.1)
    loss = (param * param).sum()
    param.grad = share(torch.ones(4), mesh, [Replicate()])
    optimizer.step()
    return refusal(loss.backward)


def sums_yet_to_be_done(mesh):
    local = torch.zeros(4)
    param = nn.Parameter(DTensor.from_local(local, mesh, [Partial()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    return refusal(FusedSGD([param], lr=1.0).step) + str(local.tolist())


def whole_state_for_a_shard(mesh):
    param = nn.Parameter(share(torch.zeros(4), mesh, [Shard(0)]))
    param.grad = share(torch.ones(4), mesh, [Shard(0)])
    optimizer = FusedAdamW([param])
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.zeros(4)
    return refusal(optimizer.step)


def checks(mesh):
    """Returns what this worker finds."""
    return {
        "otherwise": gradient_that_is_placed_otherwise(mesh),
        "moves": memory_that_moves(mesh),
        "freed": gradients_are_freed(mesh),
        "noticed": [writing_is_noticed(mesh, kind) for kind in (FusedSGD, FusedLAMB)],
        "partial": sums_yet_to_be_done(mesh),
        "whole state": whole_state_for_a_shard(mesh),
    }
