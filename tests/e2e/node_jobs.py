"""Contains jobs whose workers reduce inside their node: `node_jobs.py NAME OUT`.

NODE_JOB_VICTIM names what is killed in `bereft`.
"""

import copy
import hashlib
import io
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import DTYPES, job, main, outcome
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

STEPS = 3
WIDTH = 300


def build(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    """Builds a model of seven buckets."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(7)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1, **options)


def batch(data: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=data).to(dtype)


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def backward(model: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).float().square().mean().mul(1000).backward()
    return gradient(model)


def workers_of_my_node() -> int:
    """Returns this node's workers, as the harness places them."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.environ["THALWEG_SIDECAR"])
    return hosts.count(hosts[dist.get_rank()])


def excess(averaged: torch.Tensor, own: torch.Tensor) -> float:
    """Returns the largest error of a mean in units of its bound; more than 1 is wrong.

    In a type of precision u and smallest number t, a worker's gradient is divided (1 rounding),
    added to those of its node (at most W - 1 additions) and of other nodes (again at most W - 1, in
    float32 at least), divided again and brought to its type: at most 2 W + 1 roundings, each of at
    most u of the mean of the absolute values, or t. Twice that covers their products.
    """
    world, info = dist.get_world_size(), torch.finfo(own.dtype)
    sums = torch.stack([own.double(), own.double().abs()])
    dist.all_reduce(sums)
    mean, size = sums / world
    tiny = info.smallest_normal * info.eps
    bound = 2 * (2 * world + 1) * (size * info.eps / 2 + tiny)
    return float(((averaged.double() - mean).abs() / bound).max())


@job
def unequal() -> dict[str, Any]:
    return means(torch.float32) | {"workers": workers_of_my_node()}


@job
def all_modes() -> dict[str, Any]:
    """Runs all modes one after the other, so that processes start only once."""
    result = {"means": {name: means(dtype) for name, dtype in DTYPES.items()}}
    return result | {"modes": modes(), "resumed": resumed()}


def means(dtype: torch.dtype) -> dict[str, Any]:
    """Returns the gradients' distance from the mean, and the state's statistics."""
    model = build(dtype)
    state = thalweg.ddp.attach(model, codec="fp32", node_reduce="workers")
    data = torch.Generator().manual_seed(dist.get_rank())
    delays = torch.Generator().manual_seed(100 + dist.get_rank())
    worst, bits = 0.0, hashlib.sha256()
    for _ in range(STEPS):
        x = batch(data, dtype)
        with model.no_sync():
            own = backward(model, x)
        size = int(torch.randint(1, 300, (1,), generator=delays))
        torch.ones(size, size).mm(torch.ones(size, size))  # workers arrive in a different order
        averaged = backward(model, x)
        worst = max(worst, excess(averaged, own))
        bits.update(averaged.view(torch.uint8).numpy().tobytes())
    result = {
        "excess": worst,
        "bits": bits.hexdigest(),
        "bytes": gradient(model).nbytes * STEPS,
        "stats": state.stats(),
        "path": state.path,
        "summary": state.summary(),
        "status": state.status(),
    }
    state.close()
    try:
        backward(model, batch(data, dtype))
    except RuntimeError as error:
        result["closed"] = str(error)
    return result


def train(model: DistributedDataParallel, steps: int, data: torch.Generator) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(data)).square().mean().backward()
        model(batch(data)).square().mean().backward()
        optimizer.step()


def modes() -> dict[str, Any]:
    """Returns digests of the trained parameters by options of DDP; also with the sidecar's sums."""
    result = {}
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        for node_reduce in ("workers", "sidecar"):
            model = build(**options)
            state = thalweg.ddp.attach(model, node_reduce=node_reduce)
            train(model, 3, torch.Generator().manual_seed(dist.get_rank()))
            result[f"{options} {node_reduce}"] = digest(model)
            state.close()
    model = build(static_graph=True)
    state = thalweg.ddp.attach(model, node_reduce="workers")
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        backward(model, batch(data))
    result["static"] = hashlib.sha256(gradient(model).numpy().tobytes()).hexdigest()
    state.close()
    return result


def attach_int8(model: DistributedDataParallel) -> thalweg.ddp.State:
    return thalweg.ddp.attach(model, "int8:start=2", chunk_bytes=16384, node_reduce="workers")


def resumed() -> dict[str, Any]:
    """Returns digests of the parameters after six steps, without and with a checkpoint."""
    digests = []
    for halves in (False, True):
        torch.manual_seed(3)
        # With one parameter DDP does not rebuild its buckets, which would move int8's blocks.
        model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))
        data = torch.Generator().manual_seed(dist.get_rank())
        state = attach_int8(model)
        for step in range(6):
            if halves and step == 3:
                saved = state.state_dict()
                state.close()
                model = DistributedDataParallel(model.module)
                state = attach_int8(model)
                state.load_state_dict(saved)
            backward(model, batch(data))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
        digests.append(digest(model))
        keys = sorted(state.state_dict())
        state.close()
    return {"digests": digests, "keys": keys}


@job
def copied() -> dict[str, Any]:
    """Copies and saves the module after a step, and takes another one."""
    model = build()
    data = torch.Generator().manual_seed(dist.get_rank())
    state = thalweg.ddp.attach(model, node_reduce="workers")
    backward(model, batch(data))
    torch.save(model, io.BytesIO())
    copied = copy.deepcopy(model)
    averaged = backward(model, batch(data))
    result = {"bits": digest(averaged), "hook": hook_of(model), "copy": hook_of(copied)}
    state.close()
    return result


def hook_of(model: DistributedDataParallel) -> str:
    """Returns the communication hook that torch's statistics have."""
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


@job
def bereft() -> dict[str, Any]:
    """Returns backward's error when a worker, or a sidecar, has been killed between two steps."""
    model = build()
    state = thalweg.ddp.attach(model, node_reduce="workers")
    data = torch.Generator().manual_seed(1)
    for _ in range(3):  # in the first steps DDP itself uses Gloo
        backward(model, batch(data))
    dist.barrier()
    victim = os.environ["NODE_JOB_VICTIM"]
    if victim == f"rank {dist.get_rank()}":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim.startswith("pid") and dist.get_rank() == 0:
        os.kill(int(victim.split()[1]), signal.SIGKILL)
    began = time.monotonic()
    first = outcome(lambda: [backward(model, batch(data)) for _ in range(20)])
    return {
        "error": first,
        "seconds": time.monotonic() - began,
        "again": outcome(lambda: backward(model, batch(data))),
        "status": state.status(),
    }


@job
def late() -> dict[str, Any]:
    """Returns backward's error where rank 0 comes to the step only when all others have failed."""
    model = build()
    state = thalweg.ddp.attach(model, node_reduce="workers")
    data = torch.Generator().manual_seed(1)
    for _ in range(3):  # in the first steps DDP itself uses Gloo
        backward(model, batch(data))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.barrier()
    began = time.monotonic()
    error = outcome(lambda: backward(model, batch(data)))
    seconds = time.monotonic() - began
    if dist.get_rank() != 0:
        dist.barrier()
    return {"error": error, "seconds": seconds, "status": state.status()}


@job
def choices() -> dict[str, Any]:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 4))
    result = {
        "value": outcome(lambda: thalweg.ddp.attach(model, node_reduce="nobody")),
        "differ": outcome(
            lambda: thalweg.ddp.attach(model, node_reduce=["workers", "sidecar"][rank])
        ),
    }
    model(torch.ones(1, 4)).sum().backward()  # attaches, because the environment asks for it
    state = thalweg.ddp.state_of(model)
    assert state is not None
    return result | {"path": state.path}


if __name__ == "__main__":
    main()
