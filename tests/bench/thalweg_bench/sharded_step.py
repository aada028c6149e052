"""Defines systems that run one step of a model that torch shards, with almost no computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from thalweg.codecs import FP32, parse
from thalweg.fsdp import Compression, compress
from thalweg_bench.compression import warm_up_steps
from thalweg_bench.place import Place
from thalweg_bench.shapes import Shape
from thalweg_bench.sharded_case import Kind
from thalweg_bench.step import WriteGradient
from thalweg_bench.step_check import make_check
from thalweg_bench.worker import System

_PERIOD = 7


class _Block(nn.Module):
    """A unit, whose backward pass gives each parameter a gradient that is one number everywhere."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.values = [0.0] * len(shapes)

    def forward(self, x: Tensor) -> Tensor:
        for parameter, value in zip(self.weights, self.values, strict=True):
            x = WriteGradient.apply(x, parameter, value)  # type: ignore[no-untyped-call]
        return x


class _Step:
    """A forward pass, which gathers parameters, and a backward pass, which reduces gradients."""

    def __init__(self, blocks: Sequence[Sequence[Shape]], place: Place, kind: Kind) -> None:
        self._place = place
        self._blocks = [_Block(shapes) for shapes in blocks]
        self._groups = _make_groups(place, kind)
        model = nn.Sequential(*self._blocks)
        self._model, self._state = _shard(model, self._groups, place, kind)
        codec = parse(kind.codec)
        self._check = make_check(codec, largest=_PERIOD + place.world_size)
        self._offset = 0
        for repeat in range(2 if isinstance(codec, FP32) else warm_up_steps(codec)):
            self.prepare(repeat)
            self.run()
            self.check()

    def prepare(self, repeat: int) -> None:
        self._offset = repeat
        for number, block in enumerate(self._blocks):
            values = (self._value(number, index) for index in range(len(block.values)))
            block.values = [value + self._place.rank for value in values]
        for parameter in self._model.parameters():
            parameter.grad = None

    def run(self) -> None:
        self._model(torch.ones(1, requires_grad=True)).sum().backward()

    def check(self) -> None:
        self._check(self._gradients())

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        for group in self._groups:
            dist.destroy_process_group(group)

    def _value(self, block: int, index: int) -> int:
        return (block + index + self._offset) % _PERIOD

    def _gradients(self) -> Iterator[tuple[Tensor, float]]:
        mean_rank = (self._place.world_size - 1) / 2
        for number, block in enumerate(self._blocks):
            for index, parameter in enumerate(block.weights):
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                if gradient is not None and gradient.numel():
                    yield gradient, self._value(number, index) + mean_rank


def _shard(
    model: nn.Sequential, groups: list[Any], place: Place, kind: Kind
) -> tuple[nn.Module, Compression | None]:
    if kind.fsdp == 1:
        whole = FullyShardedDataParallel(
            model,
            process_group=groups[-1],
            auto_wrap_policy=ModuleWrapPolicy({_Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return whole, None
    mesh = DeviceMesh.from_group(groups[0], "cpu")
    if kind.hybrid:
        ranks = torch.arange(place.world_size).view(place.nodes, place.workers)
        names = ("nodes", "workers")
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
    for block in model:
        fully_shard(block, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=mesh)
    return sharded, None if kind.codec == "fp32" else compress(sharded, kind.codec)


def _make_groups(place: Place, kind: Kind) -> list[Any]:
    """Returns this worker's groups: all workers; or, of a hybrid, those that have the same shards,
    and the node's.
    """
    make = functools.partial(dist.new_group, backend=kind.backend)
    if not kind.hybrid:
        return [make()]
    ranks = torch.arange(place.world_size).view(place.nodes, place.workers)
    copies = [make(row) for row in ranks.T.tolist()]
    nodes = [make(row) for row in ranks.tolist()]
    return [copies[place.rank % place.workers], nodes[place.rank // place.workers]]


def factories(
    blocks: Sequence[Sequence[Shape]], kinds: dict[str, Kind]
) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, kind: Kind) -> System:
        return _Step(blocks, place, kind)

    return {name: functools.partial(make, kind=kind) for name, kind in kinds.items()}
