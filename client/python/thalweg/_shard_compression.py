"""Defines what thalweg.fsdp.compress() does and returns."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from thalweg import _precision, codecs
from thalweg._shard_codecs import Blocks, Cast, Piece, RowCodec
from thalweg._shard_comms import CompressedAllGather, CompressedReduceScatter
from thalweg._shard_groups import ShardGroup
from thalweg.codecs import BF16, FP16, Codec, Int8

_log = logging.getLogger("thalweg")
_CASTS: dict[type[Codec], torch.dtype] = {FP16: torch.float16, BF16: torch.bfloat16}


class Unit(NamedTuple):
    """A module whose parameters torch gathers and reduces together."""

    name: str
    module: FSDPModule
    parameters: Any  # torch's FSDPParamGroup, which is private

    @property
    def shards(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.parameters.mesh_info.shard_process_group
        return group

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The group of those that have the same shards; None: nobody else has them."""
        mesh = self.parameters.mesh_info
        return mesh.replicate_process_group if isinstance(mesh, HSDPMeshInfo) else None

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(one.group_name for one in (self.shards, self.copies) if one is not None)

    def pieces(self, *, trainable: bool) -> list[Piece]:
        return [
            Piece(one.padded_sharded_param_size.numel(), one._orig_size.numel())
            for one in self.parameters.fsdp_params
            if one.sharded_param.requires_grad or not trainable
        ]

    def __str__(self) -> str:
        return self.name or "the root"


class _Groups(NamedTuple):
    """What units of the same groups have in common."""

    shards: ShardGroup
    is_gathered: bool  # parameters are compressed, if only for copies elsewhere


class Compression:
    """What a sharded model's codec carries from step to step; compress() returns it.

    `codec` is that of gradients, `gather` that of parameters, as text.
    """

    def __init__(
        self, codec: str, gather: str, size: str, reduces: dict[str, CompressedReduceScatter]
    ) -> None:
        self.codec = codec
        self.gather = gather
        self._size = size
        self._reduces = reduces
        self._loss_scale = 1.0
        _precision.watch(self)

    @property
    def residual_bytes(self) -> int:
        """How many bytes of gradients this rank holds back for later steps."""
        return sum(one.residual.nbytes for one in self._reduces.values())

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """Hears of loss scalers: what is held back has the scale of the gradients to come."""
        if loss_scale > 0 and loss_scale != self._loss_scale:
            for one in self._reduces.values():
                one.residual *= loss_scale / self._loss_scale
            self._loss_scale = loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Returns what is held back of gradients, for a checkpoint: call it between two steps.

        "codec" and "saved_by" are the same on all ranks, and so is "rounds", by unit. "rankN" has
        float32 tensors by unit, without loss scale; only rank N has it, so that every rank's own
        result must be stored, as torch.distributed.checkpoint does.
        """
        held = {name: one.residual / self._loss_scale for name, one in self._reduces.items()}
        return {
            "codec": self.codec,
            "saved_by": self._size,
            "rounds": {name: one.rounds for name, one in self._reduces.items()},
            self._key: held,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; with model and optimizer restored, training goes on bit for bit.

        Where it was saved by another number of workers or nodes, has nothing of this rank or is of
        other units, what is held back begins at zero, which the log says. Raises ValueError if it
        belongs to another codec.
        """
        saved = str(state_dict.get("codec", ""))
        if saved != self.codec:
            raise ValueError(
                f"thalweg: the state was saved with codec {saved!r}, and {self.codec!r} is in use"
            )
        lost = self._what_is_lost(state_dict)
        for name, one in self._reduces.items():
            one.rounds = int(state_dict.get("rounds", {}).get(name, 0))
            if lost:
                one.residual.zero_()
            else:
                one.residual.copy_(state_dict[self._key][name]).mul_(self._loss_scale)
        if lost:
            _log.warning("thalweg: %s: what is held back of gradients begins at zero", lost)

    def _what_is_lost(self, state: Mapping[str, Any]) -> str:
        """Returns why this rank cannot take what was held back from a state; empty: it can."""
        then = state.get("saved_by", "")
        if then != self._size:
            return f"the state was saved by {then}, and this job has {self._size}"
        if self._key not in state:
            return f"the state has nothing of rank {dist.get_rank()}"
        held: Mapping[str, Tensor] = state[self._key]
        shapes = {name: one.residual.shape for name, one in self._reduces.items()}
        if {name: tensor.shape for name, tensor in held.items()} != shapes:
            return "the state is of other units"
        return ""

    @property
    def _key(self) -> str:
        return f"rank{dist.get_rank()}"


_states: weakref.WeakKeyDictionary[object, Compression] = weakref.WeakKeyDictionary()


def compress(
    model: nn.Module, codec: str | Codec = "int8", *, gather: str | Codec | None = None
) -> Compression:
    """Sends the shards of a model of fully_shard() in a codec from now on.

    All ranks call it, after the last fully_shard() and before the first step. `codec`, "fp16",
    "bf16" or "int8", is that of gradients, and of parameters unless `gather` names another. The
    parameters that are kept stay as they are, float32 by default; all ranks compute with what the
    bytes decode to, the owner as well. Gradients are summed exactly inside a node, and by their
    owner in float32. What int8 leaves out of them is held back and added to the next ones.

    Gradients of units that are sharded inside one node go as they are. Keep the result for
    checkpoints.

    ValueError: another codec, or no module of fully_shard(). RuntimeError: another back end than
    "thalweg", or ranks that do not ask for the same.
    """
    reduce = _check(codec)
    spread = reduce if gather is None else _check(gather)
    units = list(units_of(model))
    asked = f"gradients in {reduce.spec()}, parameters in {spread.spec()}"
    groups: dict[tuple[str, ...], _Groups] = {}
    reduces, inside = {}, []
    for unit in units:
        if unit.key not in groups:
            alike = [str(one) for one in units if one.key == unit.key]
            groups[unit.key] = _meet(unit, f"{asked}, of {', '.join(alike)}")
        group, is_gathered = groups[unit.key]
        if is_gathered:
            rows = _row_codec(spread, unit.pieces(trainable=False))
            unit.module.set_custom_all_gather(CompressedAllGather(str(unit), group, rows))
        if group.plan.has_one_node:
            inside.append(str(unit))
        else:
            reduces[unit.name] = _compressed_reduce(unit, group, reduce)
            unit.module.set_custom_reduce_scatter(reduces[unit.name])
    if inside:
        _log_inside(inside, len(units))
    size = f"{dist.get_world_size()} workers, sharded over {groups[units[0].key].shards}"
    state = Compression(reduce.spec(), spread.spec(), size, reduces)
    _states.update((unit.module, state) for unit in units)
    return state


def state_of(model: nn.Module) -> Compression | None:
    """Returns what compress(), or the environment, has made for a model; None: nothing."""
    found = (_states[module] for module in model.modules() if module in _states)
    return next(found, None)


def problem_of(codec: Codec) -> str:
    """Returns why shards cannot be sent in a codec; empty: they can."""
    if isinstance(codec, FP16 | BF16 | Int8):
        return ""
    return f"shards are sent in fp16, bf16 or int8, not in {codec.spec()}"


def _check(codec: str | Codec) -> Codec:
    parsed = codecs.parse(codec) if isinstance(codec, str) else codec
    if problem := problem_of(parsed):
        raise ValueError(f"thalweg: {problem} (docs/fsdp.md)")
    return parsed


def units_of(model: nn.Module) -> Iterator[Unit]:
    """Yields the modules that have sharded parameters of their own. ValueError: there are none."""
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                "thalweg: FullyShardedDataParallel (FSDP1) cannot be compressed: use fully_shard()"
            )
        parameters = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        if isinstance(module, FSDPModule) and parameters is not None:
            if not isinstance(parameters.mesh_info, FSDPMeshInfo):
                raise ValueError(f"thalweg: {name or 'the root'} has copies only, and no shards")
            count += 1
            yield Unit(name, module, parameters)
    if not count:
        raise ValueError("thalweg: compress() is for models of fully_shard(), and this is none")


def _meet(unit: Unit, asked: str) -> _Groups:
    """Makes a unit's groups, together with its other ranks. RuntimeError: they ask for different
    things.
    """
    _agree(unit.shards, asked)
    group = ShardGroup(unit.shards)
    if unit.copies is None:
        return _Groups(group, not group.plan.has_one_node)
    # All copies compute with the same parameters, also those whose shards lie inside a node.
    _agree(unit.copies, asked)
    inside: list[Any] = [None] * unit.copies.size()
    dist.all_gather_object(inside, group.plan.has_one_node, group=unit.copies)
    return _Groups(group, not all(inside))


def _agree(group: dist.ProcessGroup, asked: str) -> None:
    of_all: list[Any] = [None] * group.size()
    dist.all_gather_object(of_all, asked, group=group)
    for rank, theirs in enumerate(of_all):
        if theirs != of_all[0]:
            raise RuntimeError(
                f"thalweg: ranks compress differently: rank 0 of the group asks for {of_all[0]}, "
                f"and rank {rank} for {theirs}"
            )


def _log_inside(names: list[str], units: int) -> None:
    if dist.get_rank() == 0:
        _log.warning(
            "thalweg: gradients of %d of %d units are not compressed, because their shards lie "
            "inside a node; sums over copies on other nodes are exact, too: %s (docs/fsdp.md)",
            len(names),
            units,
            ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        )


def _compressed_reduce(unit: Unit, group: ShardGroup, codec: Codec) -> CompressedReduceScatter:
    return CompressedReduceScatter(
        str(unit),
        group,
        _row_codec(codec, unit.pieces(trainable=True)),
        start=codec.start_iter if isinstance(codec, Int8) else 0,
        feedback=isinstance(codec, Int8) and codec.use_error_feedback,
    )


def _row_codec(codec: Codec, pieces: Sequence[Piece]) -> RowCodec:
    return Blocks(pieces) if isinstance(codec, Int8) else Cast(_CASTS[type(codec)], pieces)
