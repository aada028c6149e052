"""Jobs that compare what codecs deliver over many steps with the true gradients: `residual_jobs.py
NAME OUT`.
"""

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs import digest, job, main
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


def held_back(state: thalweg.ddp.State, prefix: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns what a node and, on one node, the shards have left out of each parameter so far.

    The format is that of server/sidecar/codec/parameter_states.h.
    """
    [saved] = [value for key, value in state.state_dict().items() if key.startswith("node")]
    held = {}
    magic, count = struct.unpack_from("<4sI", saved)
    assert magic == b"TWS3"
    at = 8
    for _ in range(count):
        (length,) = struct.unpack_from("<I", saved, at)
        name = saved[at + 4 : at + 4 + length].decode()
        at += 4 + length
        _, *sizes = struct.unpack_from("<4Q", saved, at)
        at += 32
        arrays = []
        for size in sizes:
            values = np.frombuffer(saved, np.float32, size, at)
            arrays.append(torch.from_numpy(values.astype(np.float64)))
            at += 4 * size
        _, residual, of_shards = arrays
        elems = max(residual.numel(), of_shards.numel())
        held[name.removeprefix(prefix)] = tuple(
            values if values.numel() else torch.zeros(elems, dtype=torch.float64)
            for values in (residual, of_shards)
        )
    return held


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


if __name__ == "__main__":
    main()
