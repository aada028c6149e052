"""Defines systems that run one step of a model that torch shards, with almost no computation."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from thalweg.codecs import FP32, parse
from thalweg.fsdp import Compression, compress
from thalweg_bench import hollow
from thalweg_bench.compression import warm_up_steps
from thalweg_bench.place import Place
from thalweg_bench.shapes import Shape, tensors_of
from thalweg_bench.sharded_case import Kind
from thalweg_bench.worker import Factories, System


class _Step(hollow.Step):
    """A forward pass, which gathers parameters, and a backward pass, which reduces gradients."""

    def __init__(self, shapes: Sequence[Sequence[Shape]], place: Place, kind: Kind) -> None:
        blocks = [hollow.Block(tensors_of(of_block)) for of_block in shapes]
        codec = parse(kind.codec)
        super().__init__(blocks, place, codec)
        self._groups = _make_groups(place, kind)
        self.module, self._state = _shard(nn.Sequential(*blocks), self._groups, place, kind)
        self.warm_up(2 if isinstance(codec, FP32) else warm_up_steps(codec))

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        for group in self._groups:
            dist.destroy_process_group(group)


def _shard(
    model: nn.Sequential, groups: list[Any], place: Place, kind: Kind
) -> tuple[nn.Module, Compression | None]:
    if kind.fsdp == 1:
        whole = FullyShardedDataParallel(
            model,
            process_group=groups[-1],
            auto_wrap_policy=ModuleWrapPolicy({hollow.Block}),
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
    return [copies[place.local_rank], nodes[place.node]]


def factories(blocks: Sequence[Sequence[Shape]], kinds: Mapping[str, Kind]) -> Factories:
    """Returns systems for a Worker whose process group has been started."""

    def make(place: Place, *, kind: Kind) -> System:
        return _Step(blocks, place, kind)

    return {name: functools.partial(make, kind=kind) for name, kind in kinds.items()}
