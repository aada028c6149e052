"""Compares sums over copies of shards with the true ones, of gradients that a codec keeps."""

import fsdp2_cases
import fsdp_models as models
import torch
import torch.distributed as dist
from fsdp1_cases import Groups
from powersgd_parity_jobs import first_factor
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from thalweg.fsdp import compress


def recovered() -> dict[str, float]:
    """Returns how far PowerSGD is from the true mean of gradients whose rank its factors have, in
    units of what float32 allows, and how far with factors of rank 1.

    A batch of one on each of four workers makes a gradient of a rank of 4 at most: P = M F spans
    the columns of M, so that the result P̂ P̂ᵀ M is M. powersgd_parity_jobs.py derives how far
    arithmetic may be off, from the means of the copies' norms. A worker's gradient has the norm
    |x| |dy|, and no mean of such exceeds the largest.
    """
    mesh = fsdp2_cases.mesh_of(Groups.of("thalweg"), True)
    source = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randn(2, 1, 64, generator=source)

    def gradient(codec: str) -> torch.Tensor:
        model: nn.Module = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False)), mesh=mesh)
        if codec:
            compress(model, codec)
        (model(given[0]) * given[1]).sum().backward()
        [weight] = model.parameters()
        return models.local(weight.grad).double()

    true = gradient("")
    rows, columns = true.shape
    size = (given[0].norm() * given[1].norm()).double()
    dist.all_reduce(size, dist.ReduceOp.MAX)
    factor = first_factor("0.weight", columns, 4, 0)
    product = true @ (factor / factor.norm(dim=0))
    lengths = product.norm(dim=0)
    smallest = torch.linalg.svdvals(product / lengths)[-1]
    turn = (size / lengths).norm() / smallest
    bound = float((rows + columns + 2) * 2.0**-24 * (2 * turn + 4 / smallest + 2) * size)
    return {
        f"rank {rank}": float((gradient(f"powersgd:rank={rank},start=0") - true).norm()) / bound
        for rank in (4, 1)
    }


def whole_numbers() -> dict[str, bool]:
    """Accumulates gradients of whole numbers that all types hold, in both ways; returns, by codec
    and way, whether they have the bits of those without a codec.
    """

    def summed(codec: str, way: str) -> torch.Tensor:
        layer = nn.Linear(32, 64, bias=False)
        nn.init.ones_(layer.weight)
        dtype = torch.float16 if way == "fp16" else None
        mesh = fsdp2_cases.mesh_of(Groups.of("thalweg"), True)
        model = fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        assert isinstance(model, FSDPModule)
        if codec:
            compress(model, codec)
        source = torch.Generator().manual_seed(dist.get_rank())
        for step in range(3):
            if way == "late":
                model.set_requires_all_reduce(step == 2)
            model(torch.randint(-2, 3, (4, 32), generator=source).float()).sum().backward()
        return models.local(layer.weight.grad)

    return {
        f"{codec} {way}": torch.equal(summed(codec, way), summed("", way))
        for codec in ("fp16", "bf16")
        for way in ("each", "late", "fp16")
    }
