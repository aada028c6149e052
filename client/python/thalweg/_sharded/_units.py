"""Finds the parts of a model of fully_shard() that torch gathers and reduces together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from thalweg._sharded._codecs import Piece


class Shard(NamedTuple):
    """This rank's part of a parameter, filled up to the size of the largest one."""

    name: str
    shape: torch.Size
    elements: int  # of the whole parameter
    is_table: bool  # of an embedding


class Unit(NamedTuple):
    """A module whose parameters torch gathers and reduces together."""

    name: str
    module: FSDPModule
    parameters: Any  # torch's FSDPParamGroup, which is private
    names: dict[nn.Module, str]  # of the model's modules

    @property
    def shards(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.parameters.mesh_info.shard_process_group
        return group

    @property
    def device(self) -> torch.device:
        """Where torch gathers and reduces; an offloaded parameter is elsewhere in between."""
        device: torch.device = self.parameters.device
        return device

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The group of those that have the same shards; None: nobody else has them."""
        mesh = self.parameters.mesh_info
        if not isinstance(mesh, HSDPMeshInfo):
            return None
        group: dist.ProcessGroup = getattr(mesh, "thalweg_exact", mesh.replicate_process_group)
        return group

    def sum_copies_over(self, group: dist.ProcessGroup) -> None:
        """Lets torch sum gradients of copies over `group`, which has the same ranks."""
        mesh = self.parameters.mesh_info
        mesh.thalweg_exact = self.copies
        mesh.replicate_process_group = group

    def sum_copies_exactly(self) -> None:
        """Takes back what sum_copies_over() has done, if it has been called."""
        if self.copies is not None:
            self.parameters.mesh_info.replicate_process_group = self.copies

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(one.group_name for one in (self.shards, self.copies) if one is not None)

    def trainable(self) -> list[Shard]:
        """Returns this rank's shards, but for empty ones, of the parameters that have gradients."""
        found = [self._shard(one) for one in self._parameters(trainable=True)]
        return [shard for shard in found if shard.shape.numel()]

    def change_of_trainable(self) -> Callable[[], str]:
        """Returns what says that other parameters have gradients than do now; "": none do."""
        then = self._parameters(trainable=True)
        text = "other parameters can be trained than when thalweg.fsdp.compress() was called"
        return lambda: "" if self._parameters(trainable=True) == then else text

    def pieces(self, *, trainable: bool) -> list[Piece]:
        return [
            Piece(one.padded_sharded_param_size.numel(), one._orig_size.numel())
            for one in self._parameters(trainable=trainable)
        ]

    def _parameters(self, *, trainable: bool) -> list[Any]:
        found = self.parameters.fsdp_params
        return [one for one in found if one.sharded_param.requires_grad or not trainable]

    def _shard(self, parameter: Any) -> Shard:  # noqa: ANN401 - torch's FSDPParam is private
        info = parameter._module_info
        path = (self.names[info.module], info.param_name)
        table = isinstance(info.module, nn.Embedding | nn.EmbeddingBag)
        name = ".".join(part for part in path if part)
        shape = parameter.padded_sharded_param_size
        return Shard(name, shape, parameter._orig_size.numel(), table)

    def __str__(self) -> str:
        return self.name or "the root"


def units_of(model: nn.Module) -> Iterator[Unit]:
    """Yields the modules that have sharded parameters of their own. ValueError: there are none."""
    found: list[Any] = []  # fully_shard([a, b]) makes one unit of several modules
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                "thalweg: FullyShardedDataParallel (FSDP1) cannot be compressed: use fully_shard()"
            )
        parameters = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        if isinstance(module, FSDPModule) and parameters is not None and parameters not in found:
            if not isinstance(parameters.mesh_info, FSDPMeshInfo):
                raise ValueError(f"thalweg: {name or 'the root'} has copies only, and no shards")
            found.append(parameters)
            yield Unit(name, module, parameters, names)
    if not found:
        raise ValueError("thalweg: compress() is for models of fully_shard(), and this is none")
