"""Defines thalweg.fsdp.compress()."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from thalweg import codecs, policy
from thalweg._attach._state import State
from thalweg._sharded import _copies
from thalweg._sharded._codecs import Blocks, Cast, Parts, Piece
from thalweg._sharded._comms import CompressedAllGather, CompressedReduceScatter
from thalweg._sharded._groups import Plan, ShardGroup, nodes_of
from thalweg._sharded._state import Compression, Size
from thalweg._sharded._units import Unit, units_of
from thalweg.codecs import BF16, FP16, FP32, Codec, Int8
from thalweg.policy import Policy

_log = logging.getLogger("thalweg")
_CASTS: dict[type[Codec], torch.dtype] = {FP16: torch.float16, BF16: torch.bfloat16}
_EXACT = Policy(FP32())
_T = TypeVar("_T")


class _Asked(NamedTuple):
    """The codecs that compress() was called with."""

    reduce: Codec
    gather: Codec
    copies: Policy

    def __str__(self) -> str:
        return (
            f"gradients in {self.reduce.spec()}, parameters in {self.gather.spec()}, sums over "
            f"copies in {self.copies.spec()}"
        )


class _Groups(NamedTuple):
    """What units of the same groups have in common."""

    shards: ShardGroup
    layout: str  # of the shards of all copies, in equal words on all ranks
    crosses_nodes: bool  # shards do, of this copy or of another one
    has_far_copies: bool  # on other nodes


_states: weakref.WeakKeyDictionary[object, Compression] = weakref.WeakKeyDictionary()


def compress(
    model: nn.Module,
    codec: str | Codec = "int8",
    *,
    gather: str | Codec | None = None,
    copies: str | Codec | Policy | None = None,
) -> Compression:
    """Sends the shards of a model of fully_shard() in a codec from now on.

    All ranks call it, after the last fully_shard() and before the first step. `codec`, "fp16",
    "bf16" or "int8", is that of gradients, and of parameters unless `gather` names another. The
    parameters that are kept stay as they are, float32 by default; all ranks compute with what the
    bytes decode to, the owner as well. Gradients are summed exactly inside a node, and by their
    owner in float32. What int8 leaves out of them is held back and added to the next ones.

    On a 2-D mesh, sums over copies of shards on other nodes take `copies`, any of thalweg.codecs or
    a policy, which is `codec` unless given; shards inside one node, which cross no network, go as
    they are. Where all do, `codec` may be any of thalweg.codecs. Keep the result for checkpoints.

    ValueError: a codec that shards cannot be sent in, a model on a GPU, or no module of
    fully_shard(). RuntimeError: another back end than "thalweg", or ranks that do not ask for the
    same. For copies, also what thalweg.ddp.attach() raises.
    """
    units = list(units_of(model))
    asked = _read(codec, gather, copies)
    groups: dict[tuple[str, ...], _Groups] = {}
    for unit in units:
        if unit.key not in groups:
            alike = [str(one) for one in units if one.key == unit.key]
            groups[unit.key] = _meet(unit, f"{asked}, of {', '.join(alike)}")
    _check(asked, units, groups)
    for unit in units:
        if unit.module in _states:
            _states.pop(unit.module).close()
            unit.sum_copies_exactly()
    jobs = _compress_copies(asked, units, groups)
    reduces = _compress_shards(asked, units, groups)
    _log_exact(asked, units, groups)
    crosses = any(group.crosses_nodes for group in groups.values())
    spread = asked.gather if crosses else FP32()
    size = _size_of(groups[units[0].key])
    state = Compression(asked.reduce.spec(), spread.spec(), size, reduces, jobs)
    _states.update((unit.module, state) for unit in units)
    return state


def state_of(model: nn.Module) -> Compression | None:
    """Returns what compress(), or the environment, has made for a model; None: nothing."""
    found = (_states[module] for module in model.modules() if module in _states)
    return next(found, None)


def _read(
    codec: str | Codec, gather: str | Codec | None, copies: str | Codec | Policy | None
) -> _Asked:
    reduce = codecs.parse(codec) if isinstance(codec, str) else codec
    spread = codecs.parse(gather, "gather") if isinstance(gather, str) else gather
    if spread is not None and (problem := _problem_of(spread)):
        raise ValueError(f"thalweg: {problem} (docs/fsdp.md)")
    beside: Codec | Policy = reduce if copies is None else _policy(copies)
    return _Asked(
        reduce,
        reduce if spread is None else spread,
        Policy(beside) if isinstance(beside, Codec) else beside,
    )


def _policy(given: str | Codec | Policy) -> Codec | Policy:
    return policy.parse(given, "copies") if isinstance(given, str) else given


def _problem_of(codec: Codec) -> str:
    """Returns why shards cannot be sent in a codec; empty: they can."""
    if isinstance(codec, FP16 | BF16 | Int8):
        return ""
    return f"shards are sent in fp16, bf16 or int8, not in {codec.spec()}"


def _check(asked: _Asked, units: Sequence[Unit], groups: dict[tuple[str, ...], _Groups]) -> None:
    """Raises ValueError, on all ranks of a unit, if shards cannot be sent as asked for."""
    for unit in units:
        if unit.device.type != "cpu":
            raise ValueError(
                f"thalweg: the parameters of {unit} are gathered on {unit.device}: compress() is "
                "for models on the CPU (docs/fsdp.md)"
            )
        if unit.copies is not None and not groups[unit.key].crosses_nodes:
            continue
        if problem := _problem_of(asked.reduce) or _problem_of(asked.gather):
            hint = "" if unit.copies is None else ": copies= has the codec of sums over copies"
            raise ValueError(f"thalweg: {problem}{hint} (docs/fsdp.md)")


class _Word(NamedTuple):
    """What a rank tells the others of its mesh."""

    rank: int
    asked: str
    layout: str  # of its shards
    is_inside: bool  # its shards lie inside a node


def _meet(unit: Unit, asked: str) -> _Groups:
    """Makes a unit's groups, together with its other ranks. RuntimeError: they ask for different
    things.
    """
    plan = Plan(nodes_of(unit.shards), unit.shards.rank())
    mine = _Word(dist.get_rank(), asked, plan.layout(), plan.has_one_node)
    words = _gather(mine, unit.shards)
    if unit.copies is not None:  # all of the mesh hear of all
        words = [word for row in _gather(words, unit.copies) for word in row]
    first = min(words)
    for word in sorted(words):
        if word.asked != first.asked:
            raise RuntimeError(
                f"thalweg: ranks compress differently: rank {first.rank} asks for {first.asked}, "
                f"and rank {word.rank} for {word.asked}"
            )
    return _Groups(
        ShardGroup(unit.shards),
        _in_one([word.layout for word in sorted(words)]),
        # All copies compute with the same parameters, also those whose shards lie inside a node.
        not all(word.is_inside for word in words),
        unit.copies is not None and len(set(nodes_of(unit.copies))) > 1,
    )


def _size_of(group: _Groups) -> Size:
    beginning = f"{dist.get_world_size()} workers, sharded over "
    return Size(beginning + group.layout, f"{beginning}{group.shards}")


def _in_one(layouts: list[str]) -> str:
    return layouts[0] if len(set(layouts)) == 1 else ", ".join(layouts)


def _gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    of_all: list[Any] = [None] * group.size()
    dist.all_gather_object(of_all, value, group=group)
    return of_all


def _compress_shards(
    asked: _Asked, units: Sequence[Unit], groups: dict[tuple[str, ...], _Groups]
) -> dict[str, CompressedReduceScatter]:
    """Returns what has taken the place of reduce-scatters, by the name of the unit."""
    reduces = {}
    for unit in units:
        group = groups[unit.key]
        if group.crosses_nodes:
            rows = _row_codec(asked.gather, unit.pieces(trainable=False))
            unit.module.set_custom_all_gather(CompressedAllGather(str(unit), group.shards, rows))
        if not group.shards.plan.has_one_node:
            reduces[unit.name] = _compressed_reduce(unit, group.shards, asked.reduce)
            unit.module.set_custom_reduce_scatter(reduces[unit.name])
    return reduces


def _compress_copies(
    asked: _Asked, units: Sequence[Unit], groups: dict[tuple[str, ...], _Groups]
) -> list[tuple[State, dist.ProcessGroup]]:
    """Returns the jobs that sum over copies from now on, one for each group of copies."""
    alike: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.copies is not None and groups[unit.key].has_far_copies and asked.copies != _EXACT:
            alike.setdefault(unit.copies.group_name, []).append(unit)
    jobs = []
    for members in alike.values():
        group = members[0].copies
        assert group is not None
        jobs.append((_copies.compress(members, group, asked.copies.spec()), group))
    return jobs


def _log_exact(
    asked: _Asked, units: Sequence[Unit], groups: dict[tuple[str, ...], _Groups]
) -> None:
    """Says which units' gradients are not compressed anywhere."""
    far = asked.copies != _EXACT
    names = [
        str(unit)
        for unit in units
        if groups[unit.key].shards.plan.has_one_node
        and not (far and groups[unit.key].has_far_copies)
    ]
    if names and dist.get_rank() == 0:
        _log.warning(
            "thalweg: gradients of %d of %d units are not compressed, because their shards lie "
            "inside a node%s: %s (docs/fsdp.md)",
            len(names),
            len(units),
            "" if far else ", and sums over copies are to be exact",
            ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        )


def _compressed_reduce(unit: Unit, group: ShardGroup, codec: Codec) -> CompressedReduceScatter:
    return CompressedReduceScatter(
        str(unit),
        group,
        _row_codec(codec, unit.pieces(trainable=True)),
        start=codec.start_iter if isinstance(codec, Int8) else 0,
        feedback=isinstance(codec, Int8) and codec.use_error_feedback,
        change=unit.change_of_trainable(),
    )


def _row_codec(codec: Codec, pieces: Sequence[Piece]) -> Parts:
    if isinstance(codec, Int8):
        return Parts(Blocks, pieces)
    return Parts(functools.partial(Cast, _CASTS[type(codec)]), pieces)
