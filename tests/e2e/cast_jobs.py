"""Jobs that compare fp16 and bf16 with torch's communication hooks: `cast_jobs.py NAME OUT`."""

from typing import Any

import torch
import torch.distributed as dist
from jobs import job, main
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

ITERATIONS = 5
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
# Rounding x to the type changes it by at most UNIT * |x|, or TINY among its subnormal numbers.
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
TINY = {"fp16": 2.0**-25, "bf16": 2.0**-134}


def build() -> DistributedDataParallel:
    torch.manual_seed(3)
    layers = (nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(576, 96), nn.Tanh())
    return DistributedDataParallel(nn.Sequential(*layers, nn.Linear(96, 5)), bucket_cap_mb=0.1)


def backward(model: nn.Module, iteration: int) -> torch.Tensor:
    """Returns all parameters' gradients in one vector. The parameters are not changed."""
    data = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
    model.zero_grad()
    x = torch.randn(8, 3, 8, 8, generator=data)
    y = torch.randint(0, 5, (8,), generator=data)
    nn.functional.cross_entropy(model(x), y).backward()
    return gradient(model)


def gradient(model: nn.Module) -> torch.Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None]).double()


def mean(values: torch.Tensor) -> torch.Tensor:
    """Returns the mean over all workers in float64."""
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@job
def parity_with_torch() -> dict[str, Any]:
    """Returns Thalweg's, torch's and their mutual largest errors in units of the allowed error.

    "shift" is the distance of Thalweg's gradient from the exact mean, in roundings of a vector.

    Worker i has g_i; A is the mean of the |g_i|, w the number of workers. torch rounds each g_i,
    divides it by w, a power of two (exact except for subnormal results), and adds them up in the
    narrow type with w - 1 roundings of sums of at most A: (1 + w - 1) * UNIT * A, and TINY for each
    of the w casts / w and w divisions; additions of subnormals are exact. Thalweg rounds each
    node's mean, and the nodes' mean: 2 * (UNIT * A + TINY). Products of these and roundings in
    float32 are less than a hundredth of that.
    """
    world = dist.get_world_size()
    result = {}
    for name, hook in HOOKS.items():
        theirs, ours = build(), build()
        theirs.register_comm_hook(None, hook)
        state = thalweg.ddp.attach(ours, codec=name)
        largest = {"ours": 0.0, "torch": 0.0, "each other": 0.0, "shift": 0.0}
        for iteration in range(ITERATIONS):
            a, b = backward(ours, iteration), backward(theirs, iteration)
            own = backward(ours.module, iteration)
            exact, size = mean(own), mean(own.abs())
            ours_may = 1.01 * 2 * (UNIT[name] * size + TINY[name])
            torch_may = 1.01 * (world * UNIT[name] * size + (1 + world) * TINY[name])
            for key, difference, may in (
                ("ours", a - exact, ours_may),
                ("torch", b - exact, torch_may),
                ("each other", a - b, ours_may + torch_may),
            ):
                largest[key] = max(largest[key], (difference.abs() / may).max().item())
            shift = (exact - a).norm() / exact.norm() / UNIT[name]
            largest["shift"] = max(largest["shift"], shift.item())
        largest["sent"] = state.stats()["wire_bytes_sent"] / state.stats()["raw_bytes"]
        result[name] = largest
        state.close()
    return result


@job
def range_of_fp16() -> dict[str, Any]:
    """Returns the optimizer's gradient; each worker's is a row of the given matrix."""
    mine = torch.tensor([[7e4, 1.0, 9e-8], [1e4, 3.0, 9e-8]][dist.get_rank() % 2])
    result = {}
    for name in ("torch", "ours"):
        model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        state = thalweg.ddp.attach(model, codec="fp16") if name == "ours" else None
        if state is None:
            model.register_comm_hook(None, HOOKS["fp16"])
        model(mine).sum().backward()
        result[name] = gradient(model).tolist()
        if state is not None:
            result["counted"] = state.stats()["nonfinite_elems"]
            state.close()
    return result


if __name__ == "__main__":
    main()
