"""Compares what else the extension does with torch's own: optimizers, collectives, FSDP2.

For two workers, under torchrun. Any difference is an error.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from thalweg.optim import LAMB, FusedAdamW, FusedSGD

STEPS = 5


def check_optimizers() -> None:
    for fused, plain, options in (
        (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    ):
        ours = [torch.linspace(-1, 1, 1000).requires_grad_()]
        theirs = copy.deepcopy(ours)
        pairs = [(ours, fused(ours, **options)), (theirs, plain(theirs, **options))]
        for step in range(STEPS):
            for parameters, optimizer in pairs:
                parameters[0].grad = torch.sin(torch.arange(1000.0) + step)
                optimizer.step()
        # Each step rounds a few times in float32, at values up to 1.
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=STEPS * 4 * 2**-24)
    weight = [torch.ones(8, requires_grad=True)]
    weight[0].grad = torch.ones(8)
    LAMB(weight, lr=0.5, weight_decay=0.0).step()
    # Adam's first update is 1 in each element, so the trust ratio is 1, too.
    torch.testing.assert_close(weight[0].detach(), torch.full((8,), 0.5), rtol=1e-5, atol=0)


def check_collectives(rank: int, world: int) -> None:
    ranks = torch.arange(world, dtype=torch.float32)
    value = torch.full((1000,), float(rank))
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(value, torch.full((1000,), ranks.mean().item()), rtol=0, atol=0)
    gathered = torch.empty(world)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    torch.testing.assert_close(gathered, ranks, rtol=0, atol=0)
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, ranks.clone())
    torch.testing.assert_close(part, ranks[rank : rank + 1] * world, rtol=0, atol=0)
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank)))
    torch.testing.assert_close(swapped, ranks, rtol=0, atol=0)
    alone = dist.new_group([0])
    if rank == 0:
        dist.broadcast(value, src=0, group=alone)
    dist.barrier()


def check_fsdp2(rank: int, world: int) -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    sharded = copy.deepcopy(whole)
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, sharded)]
    for _ in range(STEPS):
        inputs = torch.randn(world, 8, 16)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(inputs.flatten(0, 1)).square().mean().backward()
        sharded(inputs[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for shard, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        if not isinstance(shard, DTensor):
            raise TypeError(f"fully_shard() left a {type(shard).__name__}")
        # Both sum the same float32 products in another order: 16 products per weight and step.
        torch.testing.assert_close(shard.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def main() -> None:
    check_optimizers()
    dist.init_process_group("thalweg")
    rank, world = dist.get_rank(), dist.get_world_size()
    check_collectives(rank, world)
    check_fsdp2(rank, world)
    dist.destroy_process_group()
    if rank == 0:
        print(f"optimizers, collectives and FSDP2 agree with torch {torch.__version__}")


if __name__ == "__main__":
    main()
