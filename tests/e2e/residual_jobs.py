"""Jobs that compare what codecs deliver over many steps with the true gradients: `residual_jobs.py
NAME OUT`.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from held_back import held_back
from jobs import job, main
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

CODECS = ("powersgd:rank=4,start=0", "int8:start=0", "onebit:start=0", "topk:ratio=0.1,start=0")
SHAPES = {"trunk": (64, 48), "head0": (48, 32), "head1": (48, 33)}
STEPS = 30


class Given(nn.Module):
    """A model whose parameters have the gradients that it is called with; it uses no others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.zeros(size) for name, size in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        products = [(self.parts[name] * value).sum() for name, value in gradients.items()]
        return torch.stack(products).sum()


def used(step: int, alike: bool) -> Iterable[str]:
    """Returns what this rank uses: in every third step it uses the other head if not `alike`."""
    other = 0 if alike or step % 3 else dist.get_rank()
    return "trunk", f"head{(step + other) % 2}"


def deliver(codec: str, alike: bool) -> dict[str, float]:
    """Returns, of each parameter, the largest difference of an element between the sum of what
    arrived and is held back, and that of the true averages, in units of what rounding allows.

    An optimizer leaves out a parameter without gradient. Each step rounds at most eight times for
    each node: its gradient's sum with the residual and what is left of it, and on the shard the
    weights, sums, a quotient, and the same two; by 2^-24 of the largest number that occurred.
    """
    model = DistributedDataParallel(Given(), find_unused_parameters=True)
    state = thalweg.ddp.attach(model, codec, chunk_bytes=4096)
    data = torch.Generator().manual_seed(dist.get_rank())
    world = dist.get_world_size()
    missing = {name: torch.zeros(size, dtype=torch.float64) for name, size in SHAPES.items()}
    largest = 0.0
    for step in range(STEPS):
        gradients = {name: torch.randn(SHAPES[name], generator=data) for name in used(step, alike)}
        model.zero_grad()
        model(gradients).backward()
        for name, shape in SHAPES.items():
            true = gradients.get(name, torch.zeros(shape)).double()
            largest = max(largest, true.abs().max().item())
            dist.all_reduce(true)
            missing[name] += true / world
            given = model.module.parts[name].grad
            if given is not None:
                missing[name] -= given.double()
                largest = max(largest, given.abs().max().item())
    errors = {}
    held = held_back(state, "parts.")
    for name, shape in SHAPES.items():
        on_nodes, on_shards = (part.reshape(shape) for part in held[name])
        largest = max(largest, on_nodes.abs().max().item(), on_shards.abs().max().item())
        dist.all_reduce(on_nodes)
        dist.all_reduce(on_shards)  # only one node knows them
        missing[name] -= on_nodes / world + on_shards
        allowed = STEPS * 8 * world * 2.0**-24 * 2 * largest
        errors[name] = missing[name].abs().max().item() / allowed
    state.close()
    return errors


@job
def delivered() -> dict[str, dict[str, float]]:
    return {
        f"{codec} {alike}": deliver(codec, alike) for codec in CODECS for alike in (True, False)
    }


class Layers(nn.Module):
    """Layers in several buckets, which DDP cuts anew after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def start(codec: str) -> tuple[DistributedDataParallel, thalweg.ddp.State]:
    torch.manual_seed(1)
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.03)
    return model, thalweg.ddp.attach(model, codec, chunk_bytes=4096)


def train(model: DistributedDataParallel, steps: range) -> list[str]:
    """Returns a digest of the parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests = []
    for step in steps:
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().sum().backward()
        optimizer.step()
        digests.append(digest(model))
    return digests


@job
def resumed() -> dict[str, Any]:
    """Takes eight steps, and the last four again from a checkpoint."""
    result = {}
    # What these two make of a tensor depends on no other tensor, and so not on buckets.
    for codec in ("int8:start=0", "onebit:start=0"):
        model, state = start(codec)
        train(model, range(4))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        codec_state = state.state_dict()
        straight = train(model, range(4, 8))
        state.close()
        model, state = start(codec)
        model.load_state_dict(saved)
        state.load_state_dict(codec_state)
        result[codec] = {"straight": straight, "resumed": train(model, range(4, 8))}
        state.close()
    return result


@job
def wrapped_anew() -> list[str]:
    """Trains the same parameters in three jobs, and returns these."""
    model, state = start("onebit:start=0")
    states = [state]
    for codec in ("onebit:start=0", "fp32"):
        train(model, range(2))
        model = DistributedDataParallel(model.module)
        states.append(thalweg.ddp.attach(model, codec))
    for state in states:
        state.close()
    return [state.job for state in states]


if __name__ == "__main__":
    main()
