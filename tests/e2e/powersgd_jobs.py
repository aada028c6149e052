"""Jobs that train with PowerSGD: `powersgd_jobs.py NAME OUT`."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import job, main, outcome
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

START = 2  # the first iteration that is compressed: torch allows none earlier


class Net(nn.Module):
    """Convolutions and linear layers of several shapes, some of which are not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.linear1 = nn.Linear(512, 96)
        self.linear2 = nn.Linear(96, 96)
        self.last = nn.Linear(96, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv1(x))
        x = torch.tanh(self.conv2(x)).flatten(1)
        return self.last(torch.tanh(self.linear2(torch.tanh(self.linear1(x)))))


def train(hook: str | None) -> list[float]:
    """Returns the losses, averaged over the workers, of 80 steps on the same 32 samples each.

    `hook` is Thalweg's codec, or None for torch's hook.
    """
    torch.manual_seed(3)
    model = DistributedDataParallel(Net())
    state = None
    if hook is None:
        powersgd = torch_powersgd.PowerSGDState(None, 2, START, min_compression_rate=2)
        model.register_comm_hook(powersgd, torch_powersgd.powerSGD_hook)
    else:
        state = thalweg.ddp.attach(model, codec=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(50 + dist.get_rank())
    x = torch.randn(32, 3, 8, 8, generator=data)
    y = torch.randint(0, 5, (32,), generator=data)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if state is not None:
        state.close()
    mean = torch.stack(losses).double()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


@job
def free_running() -> dict[str, list[float]]:
    return {"ours": train(f"powersgd:rank=2,start={START}"), "torch": train(None)}


class Sums(nn.Module):
    """Its gradients are what it is called with, in buckets of few matrices, tall and wide, of two
    types.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = (1500, 1733, 1911, 2101, 1650, 1999, 2222, 1810)
        shapes = [(n, 16) if i % 3 else (16, n) for i, n in enumerate(sizes)]
        types = [torch.bfloat16 if i % 4 == 1 else torch.float32 for i in range(len(sizes))]
        self.matrices = nn.ParameterList(
            [
                nn.Parameter(torch.zeros(shape, dtype=dtype))
                for shape, dtype in zip(shapes, types, strict=True)
            ]
        )

    def forward(self, gradient: float) -> torch.Tensor:
        return torch.stack([(matrix * gradient).sum().float() for matrix in self.matrices]).sum()


@job
def given_up_in_many_buckets() -> list[float]:
    """Returns the gradients of a step in which fp16 cannot hold P of some matrices and Q of others,
    after one in which nothing can be compressed.

    Chunks are small, so that a part fills its window: nodes that sent in different orders would
    wait for each other.
    """
    means = set()
    for _ in range(3):
        model = DistributedDataParallel(Sums(), bucket_cap_mb=0.001)
        codec = thalweg.PowerSGD(rank=1, start_iter=2, wire="fp16")
        state = thalweg.ddp.attach(model, codec, chunk_bytes=4096)
        for gradient in (1.0, 1.0, 3072.0, float("nan"), 3072.0, 3072.0):
            model.zero_grad()
            model(gradient).backward()
        means |= {each for p in model.parameters() for each in p.grad.unique().tolist()}
        state.close()
    return sorted(means)


@job
def many_buckets() -> dict[str, Any]:
    """Runs 60 layers in DDP's default buckets, 200 iterations: torch's hook hangs in the second."""
    torch.manual_seed(5)
    layers = [nn.Linear(128, 128) for _ in range(60)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.25)
    state = thalweg.ddp.attach(model, codec="powersgd:rank=2,start=3")
    data = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        model(torch.randn(4, 128, generator=data)).square().mean().backward()
        optimizer.step()
    stats = state.stats()
    state.close()
    return {"digest": digest(model), "stats": stats}


@job
def nonfinite() -> dict[str, Any]:
    """Gives one worker a NaN in one gradient element in iteration 4, an infinity in iteration 6."""
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    state = thalweg.ddp.attach(model, codec="powersgd:rank=2,start=2")
    result = []
    for iteration in range(9):
        x = torch.zeros(1, 64)
        x[0, 3] = 1 + dist.get_rank() + iteration
        if dist.get_rank() == 0 and iteration in (4, 6):
            x[0, 5] = torch.nan if iteration == 4 else torch.inf
        model.zero_grad()
        # The gradient is x in every row for any weights.
        model.module.weight.data.zero_()
        model(x).sum().backward()
        grad = model.module.weight.grad
        assert grad is not None
        result.append(
            {
                "nan": int(grad.isnan().sum()),
                "inf": int(grad.isinf().sum()),
                "column": grad[:, 3].tolist(),
            }
        )
    counted = state.stats()["nonfinite_elems"]
    state.close()
    return {"iterations": result, "counted": counted}


@job
def by_columns() -> list[float]:
    """Averages gradients of rank 2 of a matrix whose memory is by columns; returns the errors."""
    torch.manual_seed(5)
    linear = nn.Linear(96, 160, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    model = DistributedDataParallel(linear)
    state = thalweg.ddp.attach(model, codec="powersgd:rank=2,start=2")
    inputs = torch.randn(dist.get_world_size(), 96)
    outputs = torch.randn(dist.get_world_size(), 160)
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    mean = outputs.t() @ inputs / dist.get_world_size()
    errors = []
    for _ in range(6):
        model.zero_grad()
        (model(inputs[own]) * outputs[own]).sum().backward()
        grad = model.module.weight.grad
        assert grad is not None
        errors.append(float((grad - mean).norm() / mean.norm()))
    state.close()
    return errors


def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8, generator=data)).square().mean().backward()
    optimizer.step()


def fresh(codec: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, thalweg.ddp.State]:
    torch.manual_seed(7)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, thalweg.ddp.attach(model, codec)


@job
def resume() -> dict[str, Any]:
    """Takes ten steps, with a checkpoint after six; then repeats the last four from it."""
    codec = "powersgd:rank=2,start=3"
    folder = str(Path(os.environ["TMPDIR"]) / "checkpoint")
    model, optimizer, state = fresh(codec)
    for number in range(10):
        if number == 6:
            saved = {"model": model.module, "optimizer": optimizer, "thalweg": state}
            checkpoint.save(
                {name: value.state_dict() for name, value in saved.items()}, checkpoint_id=folder
            )
        step(model, optimizer, number)
    straight = digest(model)
    state.close()

    model, optimizer, state = fresh(codec)
    # creates the optimizer's state, and a state in the sidecar to replace
    step(model, optimizer, 0)
    loaded = {
        name: value.state_dict()
        for name, value in {"model": model.module, "optimizer": optimizer, "thalweg": state}.items()
    }
    checkpoint.load(loaded, checkpoint_id=folder)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    state.load_state_dict(loaded["thalweg"])
    for number in range(6, 10):
        step(model, optimizer, number)
    resumed = digest(model)
    wrong = dict(loaded["thalweg"], codec="fp16")
    refused = outcome(lambda: state.load_state_dict(wrong))
    state.close()

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"straight": straight, "resumed": resumed, "refused": refused}


@job
def other_half_type() -> dict[str, list[float]]:
    """Averages gradients in one 16-bit type with factors in the other, by both types' names."""
    result = {}
    for name, wire, value in (("float16", "bf16", 65408.0), ("bfloat16", "fp16", 2.0**100)):
        model = nn.Linear(64, 64).to(getattr(torch, name))
        ddp = DistributedDataParallel(model)
        state = thalweg.ddp.attach(ddp, codec=f"powersgd:rank=1,start=0,wire={wire}")
        loss = ddp(torch.zeros(1, 64, dtype=model.weight.dtype)).sum()
        (loss * value).backward()
        assert model.bias.grad is not None
        result[name] = sorted({float(each) for each in model.bias.grad})
        assert state.stats()["compressed_since"] == 1
        state.close()
    return result


if __name__ == "__main__":
    main()
