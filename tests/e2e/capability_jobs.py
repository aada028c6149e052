"""Jobs on nodes with different CPUs: `capability_jobs.py NAME OUT`."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import job, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg import _C, optim

CODECS = ("fp32", "fp16", "bf16", "int8", "onebit", "topk:0.05", "powersgd:rank=2,start=2")
ITERATIONS = 8


def build() -> DistributedDataParallel:
    torch.manual_seed(3)
    layers = (nn.Linear(300, 130), nn.Tanh(), nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 5))
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.05)


@job
def replicas() -> dict[str, Any]:
    """Returns the instruction set and, for each codec, digests of what must not differ.

    "gradients" covers the averaged gradients of all iterations, "parameters" what Thalweg's AdamW
    has made of them.
    """
    result: dict[str, Any] = {"cpu": _C.cpu_capability()}
    for codec in CODECS:
        model = build()
        state = thalweg.ddp.attach(model, codec=codec)
        optimizer = optim.FusedAdamW(model.parameters(), lr=0.01)
        gradients = hashlib.sha256()
        data = torch.Generator().manual_seed(40 + dist.get_rank())
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            x = torch.randn(8, 300, generator=data)
            nn.functional.cross_entropy(
                model(x), torch.randint(0, 5, (8,), generator=data)
            ).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                gradients.update(parameter.grad.numpy().tobytes())
            optimizer.step()
        state.close()
        result[codec] = {"gradients": gradients.hexdigest(), "parameters": digest(model)}
    return result


if __name__ == "__main__":
    main()
