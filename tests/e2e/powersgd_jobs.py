"""Jobs that compare PowerSGD with torch's communication hook: `powersgd_jobs.py NAME OUT`."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs import digest, job, main, outcome
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

START = 2  # the first iteration that is compressed: torch allows none earlier
ITERATIONS = START + 20
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


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


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def first_factor(name: str, columns: int, rank: int, use: int) -> torch.Tensor:
    """The Q with which Thalweg begins, columns x rank, as docs/compression.md describes it."""
    q = np.empty((columns, rank))
    for column in range(rank):
        key = 0
        for part in (0, fnv1a(name), column, use):
            key = mix((key + GOLDEN + mix((part + GOLDEN) & MASK)) & MASK)
        for j in range(columns):
            key = (key + GOLDEN) & MASK
            q[j, column] = ((mix(key) >> 40) - 2**23) / 2**23
    return torch.from_numpy(q)


class SameStart:
    """torch's hook, made to begin with Thalweg's Q."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.state = torch_powersgd.PowerSGDState(
            None, rank, START, min_compression_rate=2, orthogonalization_epsilon=0
        )
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last() and bucket.index() == 0, "the comparison needs a single bucket"
        if self.state.iter == START and not self.state.q_memory_dict:
            self._fill(bucket)
        return torch_powersgd.powerSGD_hook(self.state, bucket)

    def _fill(self, bucket: dist.GradBucket) -> None:
        by_shape: dict[tuple[int, int], list[str]] = {}
        for parameter in bucket.parameters():
            rows, columns = parameter.shape[0], parameter[0].numel()
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if (rows + columns) * rank * 2 < rows * columns:
                by_shape.setdefault((rows, columns), []).append(self.names[parameter])
        ps, qs = [], []
        for (rows, columns), names in by_shape.items():
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            for name in names:
                qs.append(first_factor(name, columns, rank, START).flatten())
                ps.append(torch.zeros(rows * rank))
        dtype = bucket.buffer().dtype
        self.state.p_memory_dict[0] = torch.cat(ps).to(dtype)
        self.state.q_memory_dict[0] = torch.cat(qs).to(dtype)


def gradients(model: DistributedDataParallel, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every iteration, all parameters' in one vector. The parameters are not changed."""
    data = torch.Generator().manual_seed(40 + dist.get_rank())
    result = []
    for _ in range(ITERATIONS):
        model.zero_grad()
        x = torch.randn(8, 3, 8, 8, generator=data)
        y = torch.randint(0, 5, (8,), generator=data)
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        result.append(torch.cat([g.flatten() for g in grads if g is not None]).double())
    return result


def distances(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    return [
        ((a - b).norm() / b.norm()).item()  # of each iteration
        for a, b in zip(ours, theirs, strict=True)
    ]


@job
def parity_with_torch() -> dict[str, Any]:
    """How far Thalweg, and torch's hook in float32, are from torch's hook in float64."""
    result = {}
    for rank in (1, 2, 4, 8):
        runs = {}
        for kind, dtype in (("exact", torch.float64), ("torch", torch.float32)):
            torch.manual_seed(3)
            net = Net()
            model = DistributedDataParallel(net.to(dtype))
            model.register_comm_hook(SameStart(net, rank), SameStart.hook)
            runs[kind] = gradients(model, dtype)
        torch.manual_seed(3)
        model = DistributedDataParallel(Net())
        state = thalweg.ddp.attach(model, codec=f"powersgd:rank={rank},start={START}")
        runs["ours"] = gradients(model, torch.float32)
        stats = state.stats()
        state.close()
        result[rank] = {
            "ours": distances(runs["ours"], runs["exact"]),
            "torch": distances(runs["torch"], runs["exact"]),
            "sent": stats["wire_bytes_sent"],
            "raw": stats["raw_bytes"],
        }
    return result


@job
def many_buckets() -> dict[str, Any]:
    """60 layers in DDP's default buckets, 200 iterations: torch's hook hangs in the second."""
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
    """One worker has a NaN in one gradient element in iteration 4, an infinity in iteration 6."""
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
        # Its gradient is x in every row, whatever the weights are.
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
    """Ten steps, with a checkpoint after six; then the last four again from the checkpoint."""
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
    step(model, optimizer, 0)  # gives the optimizer its state, and the sidecar one to replace
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


if __name__ == "__main__":
    main()
