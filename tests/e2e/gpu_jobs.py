"""Jobs whose gradients may be on a GPU: `gpu_jobs.py NAME OUT`, with GPU_JOB_DEVICE."""

import os
from typing import Any

import torch
import torch.distributed as dist
from jobs import job, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
import thalweg.optim
import thalweg.ps

STEPS = 6
BUSY_CYCLES = 20_000_000  # some milliseconds during which a GPU does nothing else


def device() -> torch.device:
    return torch.device(os.environ["GPU_JOB_DEVICE"])


def build() -> DistributedDataParallel:
    torch.manual_seed(3)
    layers = (nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return DistributedDataParallel(nn.Sequential(*layers).to(device()), bucket_cap_mb=0.3)


def gradient(model: nn.Module) -> torch.Tensor:
    """Returns all gradients as the next work on the current stream sees them, in one vector."""
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def keep_busy() -> None:
    """Delays what is queued next, so that a reader that does not wait for it is detected."""
    if device().type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def mean(values: torch.Tensor) -> torch.Tensor:
    """Returns the mean over both workers, on the CPU, rounded once."""
    total = values.cpu().double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).float()


def backward(model: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    keep_busy()
    model(x).square().mean().backward()
    return gradient(model)


def differing_steps(model: DistributedDataParallel) -> int:
    """Counts the steps in which an averaged gradient is not bit for bit the mean of the workers'
    own.

    The sum of two float32 is exact in float64 unless their exponents are 29 apart. Then the smaller
    one does not change the rounding of the larger one, except for ties, which halving keeps.
    """
    data = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    differing = 0
    for _ in range(STEPS):
        x = torch.randn(32, 256, generator=data).to(device())
        with model.no_sync():
            own = backward(model, x)
        expected = mean(own)
        averaged = backward(model, x).cpu()
        differing += int(not torch.equal(averaged, expected))
        optimizer.step()
    return differing


@job
def served_weights() -> dict[str, Any]:
    """Counts the steps after which a ServerOptimizer's weights are not those of the fused optimizer
    on the CPU with the workers' mean.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device())
    parameters = list(model.parameters())
    kept = [nn.Parameter(each.detach().cpu().clone()) for each in parameters]
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    served = thalweg.ps.ServerOptimizer(parameters, "sgd", **options, bucket_cap_mb=0.2)
    local = thalweg.optim.FusedSGD(kept, **options)
    data = torch.Generator().manual_seed(dist.get_rank())
    differing = 0
    for _ in range(STEPS):
        x = torch.randn(32, 256, generator=data).to(device())
        own = torch.autograd.grad(model(x).square().mean(), parameters)
        for parameter, gradient_ in zip(kept, own, strict=True):
            parameter.grad = mean(gradient_)
        served.zero_grad()
        keep_busy()
        model(x).square().mean().backward()
        served.step()
        local.step()
        pairs = zip(parameters, kept, strict=True)
        differing += any(not torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
    state = served.state_dict()["state"]
    moments = [state[index]["momentum_buffer"] for index in range(len(kept))]
    expected = [local.state[each]["momentum_buffer"] for each in kept]
    pairs = zip(moments, expected, strict=True)
    same = all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
    return {"differing": differing, "same_moments": same}


@job
def exact_means() -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    model = build()
    state = thalweg.ddp.attach(model, codec="fp32", chunk_bytes=16384)
    result: dict[str, Any] = {"differing": differing_steps(model), "path": state.path}
    if device().type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # not the default stream
            result["differing on a side stream"] = differing_steps(model)
    result["status"] = state.status()
    result["summary"] = state.summary()
    state.close()
    return result


@job
def closed_early() -> dict[str, Any]:
    """Returns the error of backward after the session has been closed."""
    model = build()
    state = thalweg.ddp.attach(model)
    x = torch.ones(4, 256, device=device())
    backward(model, x)
    state.close()
    try:
        backward(model, x)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


if __name__ == "__main__":
    main()
