"""Contains the workers' jobs of the end-to-end tests: `jobs.py NAME OUT` runs a function of this
file.

Its result goes to OUT as JSON.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thalweg.ddp

JOBS: dict[str, Callable[[], Any]] = {}


def job(function: Callable[[], Any]) -> Callable[[], Any]:
    JOBS[function.__name__] = function
    return function


class Convex(nn.Module):
    """Softmax regression whose weights are in six tensors: convex, yet several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(256, 40, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(self.parts, x.split(256, dim=1), strict=True)
        return torch.stack([part(piece) for part, piece in pieces]).sum(0)


def train_convex(codec: str | None, jitter: bool = False) -> dict[str, Any]:
    """Takes 100 steps with Thalweg, or without (codec None); returns the workers' losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(Convex(), bucket_cap_mb=0.1)
    state = None if codec is None else thalweg.ddp.attach(model, codec=codec, chunk_bytes=16384)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = torch.Generator().manual_seed(100 + rank)
    delays = torch.Generator().manual_seed(200 + rank)
    losses = []
    for _ in range(100):
        y = torch.randint(0, 40, (16,), generator=data)
        x = torch.randn(16, 6 * 256, generator=data) + 40 * functional.one_hot(y, 6 * 256)
        x = functional.normalize(x)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if jitter:  # workers arrive in a different order in every step
            size = int(torch.randint(1, 400, (1,), generator=delays))
            torch.ones(size, size).mm(torch.ones(size, size))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses).double()
    dist.all_reduce(total)
    result = {"losses": (total / world).tolist(), "digest": digest(model)}
    if state is not None:
        result["stats"] = state.stats()
        state.close()
    return result


@job
def parity() -> dict[str, Any]:
    return {
        "gloo": train_convex(None),
        "fp32": train_convex("fp32"),
        "fp32 again": train_convex("fp32", jitter=True),
        "fp16": train_convex("fp16"),
        "bf16": train_convex("bf16"),
    }


class Branches(nn.Module):
    """A model with a parameter that odd steps do not use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(60, 700, dtype=dtype)
        self.sometimes = nn.Linear(700, 700, dtype=dtype)
        self.last = nn.Linear(700, 5, dtype=dtype)

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.sometimes(x) if use_all else x)


DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}


def steps(
    model: DistributedDataParallel, dtype: torch.dtype, *, unused: bool, accumulate: bool
) -> list[torch.Tensor]:
    """Takes four optimizer steps of two batches each; returns the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        use_all = not unused or step % 2 == 0
        # torch itself fails when the first backward pass of a static graph does not synchronise.
        with model.no_sync() if accumulate else contextlib.nullcontext():
            model(torch.randn(8, 60, generator=data).to(dtype), use_all).float().mean().backward()
        model(torch.randn(8, 60, generator=data).to(dtype), use_all).float().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@job
def modes() -> dict[str, Any]:
    """Returns the largest difference from plain DDP in units of precision, for every mode."""
    result = {}
    flags = list(itertools.product([False, True], repeat=3))
    cases = [(view, static, unused, "fp32") for view, static, unused in flags]
    cases += [(True, False, False, name) for name in DTYPES] + [(False, False, True, "fp16")]
    for view, static, unused, name in cases:
        dtype, finals, options = DTYPES[name], [], {}
        options["gradient_as_bucket_view"] = view
        options["static_graph"] = static
        options["find_unused_parameters"] = unused
        for ours in (False, True):
            torch.manual_seed(5)
            model = DistributedDataParallel(Branches(dtype), bucket_cap_mb=1, **options)
            state = thalweg.ddp.attach(model) if ours else None
            # A static graph cannot have parameters that are used only sometimes.
            sometimes = unused and not static
            finals.append(steps(model, dtype, unused=sometimes, accumulate=not static))
            if state is not None:
                state.close()
        difference = max(
            ((a - b).abs() / a.abs().clamp(min=1)).max().item()
            for a, b in zip(*finals, strict=True)
        )
        key = f"view={view:d} static={static:d} unused={unused:d} {name}"
        result[key] = difference / torch.finfo(dtype).eps
    return result


@job
def one_stays() -> str | None:
    """Takes a step; rank 1 then stays in the job until the pipe LEAVE is closed."""
    model = DistributedDataParallel(nn.Linear(50, 3))
    state = thalweg.ddp.attach(model)
    model(torch.ones(2, 50)).sum().backward()
    if dist.get_rank() == 1:
        Path(os.environ["LEAVE"]).read_bytes()
    return state.status()


@job
def two_models() -> dict[str, Any]:
    """Trains two models in turn while DataLoader workers fork; returns both replicas' digests."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(DistributedDataParallel(nn.Linear(50, 3)))
    states = [thalweg.ddp.attach(model) for model in models]
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(60, 50, generator=torch.Generator().manual_seed(rank)))
    loader = DataLoader(data, batch_size=10, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for (batch,) in loader:
            for model in models:
                loss = model(batch).square().mean()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1 * parameter.grad)
                        parameter.grad = None
    return {
        "digests": [digest(model) for model in models],
        "sidecars": [state.sidecar for state in states],
        "rounds": [state.stats()["rounds"] for state in states],
        "status": [state.status() for state in states],
    }


@job
def left_out() -> dict[str, Any]:
    """Returns the summary of a codec that compresses no gradient of its model."""
    layers = nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64)
    model = DistributedDataParallel(nn.Sequential(*layers))
    with contextlib.closing(thalweg.ddp.attach(model, "powersgd:rank=1;1.bias=fp16")) as state:
        return {"summary": state.summary()}


@job
def killed_midway() -> dict[str, Any]:
    """Kills the last rank in the middle of a step; returns what the others are told."""
    model = DistributedDataParallel(nn.Linear(50, 3))
    thalweg.ddp.attach(model)
    for _ in range(3):  # in the first steps DDP itself uses Gloo
        model(torch.ones(2, 50)).sum().backward()
    job_runner.meet()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(2, 50)).sum().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


@job
def refused() -> dict[str, Any]:
    """Attaches to modules that differ between the workers, or cannot be attached to."""
    rank = dist.get_rank()
    order = ["left", "right"] if rank == 0 else ["right", "left"]
    swapped = nn.Module()
    for name in order:
        swapped.add_module(name, nn.Linear(4, 4))
    hooked = DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(None, some_hook)
    cases = {
        "order": lambda: thalweg.ddp.attach(DistributedDataParallel(swapped)),
        "codec": lambda: thalweg.ddp.attach(
            DistributedDataParallel(nn.Linear(4, 4)), codec=["fp32", "fp16"][rank]
        ),
        "bad codec on one": lambda: thalweg.ddp.attach(
            DistributedDataParallel(nn.Linear(4, 4)), codec=["fp32", "zip"][rank]
        ),
        "hook": lambda: thalweg.ddp.attach(hooked),
        "complex": lambda: thalweg.ddp.attach(
            DistributedDataParallel(nn.Linear(4, 4, dtype=torch.complex64))
        ),
        "module": lambda: thalweg.ddp.attach(nn.Linear(4, 4)),
        "sidecar": lambda: thalweg.ddp.attach(DistributedDataParallel(nn.Linear(4, 4))),
    }
    return {name: outcome(case) for name, case in cases.items()}


@job
def sparse() -> dict[str, Any]:
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    state = thalweg.ddp.attach(model)
    first = outcome(lambda: model(torch.tensor([1, 2])).sum().backward())
    twice = outcome(lambda: thalweg.ddp.attach(model))
    state.close()
    dense = DistributedDataParallel(nn.Linear(4, 4))
    thalweg.ddp.attach(dense).close()
    closed = outcome(lambda: dense(torch.ones(1, 4)).sum().backward())
    return {"sparse": first, "twice": twice, "closed": closed}


def some_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
