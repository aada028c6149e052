"""Takes the place of the all-gather and the reduce-scatter of a unit of fully_shard()."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Work
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from thalweg._sharded._codecs import Parts, RowCodec
from thalweg._sharded._groups import ShardGroup
from thalweg._torch import _nonfinite

_log = logging.getLogger("thalweg")


class Remarks:
    """Says once for each unit and reason what is not compressed; rank 0 says it for all."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said and dist.get_rank() == 0:
            _log.warning("thalweg: %s goes uncompressed: %s (docs/fsdp.md)", self._unit, text)
        self._said.add(text)


class _Arriving(Work):
    """Collectives under way, each with what is to be done when its bytes are there, in order."""

    def __init__(self, parts: Sequence[tuple[Work, Callable[[], None]]]) -> None:
        super().__init__()
        self._parts = deque(parts)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while self._parts:
            work, finish = self._parts[0]
            work.wait(timeout)
            finish()
            self._parts.popleft()
        return True


class CompressedAllGather(DefaultAllGather):
    """Gathers a unit's parameters in a codec; the owner, too, takes what the bytes decode to."""

    def __init__(self, unit: str, group: ShardGroup, codec: Parts) -> None:
        self._group = group
        self._codec = codec
        self._remarks = Remarks(f"the all-gather of {unit}")

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        why = self._why_exact(input_tensor, group)
        if why:
            self._remarks.say(why)
        if why is not None:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        columns = (
            self._codec.split(input_tensor.view(1, -1)),
            self._codec.split(output_tensor.view(group.size(), -1)),
        )
        arriving = _Arriving(
            [
                self._begin(codec, own, out, group)
                for codec, own, out in zip(self._codec.codecs, *columns, strict=True)
            ]
        )
        if async_op:
            return arriving
        arriving.wait()
        return None

    def _begin(
        self, codec: RowCodec, own: Tensor, out: Tensor, group: dist.ProcessGroup
    ) -> tuple[Work, Callable[[], None]]:
        """Begins to gather a part; returns that, and what decodes it into `out`."""
        payload = codec.encode(own)
        gathered = payload.new_empty(group.size(), codec.row_bytes)
        work = dist.all_gather_into_tensor(
            gathered.view(-1), payload.view(-1), group=group, async_op=True
        )
        return work, lambda: codec.decode(gathered, out)

    def _why_exact(self, values: Tensor, group: dist.ProcessGroup) -> str | None:
        """Returns why the values go as they are; "": nobody asked for more; None: they do not."""
        if group.group_name != self._group.group.group_name:
            return ""  # whole parameters that were sharded anew after forward, in a smaller group
        return _why_exact(values, values.numel(), self._codec)


class CompressedReduceScatter(DefaultReduceScatter):
    """Sums a unit's gradients: exactly inside each node, and in a codec between nodes.

    What a codec leaves out of the sums that this rank carries stays in `residual`, float32
    [ranks, elements], and is added to the next ones. The first `start` rounds are exact.
    """

    def __init__(
        self,
        unit: str,
        group: ShardGroup,
        codec: Parts,
        *,
        start: int,
        feedback: bool,
        change: Callable[[], str],
    ) -> None:
        """`change` says whether the unit's gradients are of other parameters than the codec's."""
        self.rounds = 0
        self.residual = torch.zeros(
            group.carries if feedback else 0,
            codec.residual_elements if feedback else 0,
            device="cpu",
        )
        self._feedback = feedback
        self._start = start
        self._change = change
        self._group = group
        self._codec = codec
        self._remarks = Remarks(f"the reduce-scatter of {unit}")
        self._nonfinite: Tensor | int = 0

    @property
    def nonfinite_elems(self) -> int:
        """How many elements of this rank's sums were NaN or infinite, as they left here."""
        return int(self._nonfinite)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - torch's _ReduceOp is private
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - Work, or None when it is done
        self.rounds += 1
        why = _why_exact(input_tensor, input_tensor.numel() // group.size(), self._codec)
        scale = _scale_of(op, group.size())
        if why is None:
            why = f"its operation is {op}" if scale is None else self._change() or None
        if why:
            self._remarks.say(why)
        if why is not None or scale is None or self.rounds <= self._start:
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
            if work is None:
                self._nonfinite += _nonfinite.count(output_tensor)
            return work
        columns = (
            self._codec.split(input_tensor.view(group.size(), -1)),
            self._codec.split(output_tensor.view(1, -1)),
            self._codec.split_residual(self.residual)
            if self._feedback
            else [None] * len(self._codec.codecs),
        )
        _Arriving(
            [
                self._begin(codec, rows, scale, out, residual)
                for codec, rows, out, residual in zip(self._codec.codecs, *columns, strict=True)
            ]
        ).wait()
        return None

    def _begin(
        self,
        codec: RowCodec,
        rows: Tensor,
        scale: Any,  # noqa: ANN401 - a number or a tensor
        out: Tensor,
        residual: Tensor | None,
    ) -> tuple[Work, Callable[[], None]]:
        """Begins to exchange a part; returns that, and what writes this rank's sums to `out`."""
        sums = self._group.sum_in_node(rows).mul_(scale)
        work, arrived = self._group.exchange(codec.encode(sums[1:], residual))

        def finish() -> None:
            others = torch.empty(len(arrived), codec.elements, device=rows.device)
            codec.decode(arrived, others)
            out.copy_(self._group.add_nodes(sums[0], others.unbind()))
            self._nonfinite += _nonfinite.count(out)

        return work, finish


def _why_exact(values: Tensor, row: int, codec: Parts) -> str | None:
    """Returns why rows of `row` elements go as they are; "": because they are short already."""
    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its values are {values.dtype}"
    if row != codec.elements:
        return (
            f"it has {row} elements of each rank, and not the {codec.elements} of the parameters "
            "that could be trained when thalweg.fsdp.compress() was called"
        )
    return "" if values.itemsize <= codec.itemsize else None


def kind_of(op: Any) -> tuple[Any, Any]:  # noqa: ANN401 - torch's types of operations are private
    """Returns the kind of an operation, such as ReduceOp.SUM, and the factor of a PREMUL_SUM."""
    # torch tells the factor to nobody but pickle. RedOpTypes pass for ReduceOps.
    whole: Any = op if type(op) is ReduceOp else ReduceOp(op)
    kind, factor = whole.__getstate__()
    return kind, factor


def _scale_of(op: Any, size: int) -> Any:  # noqa: ANN401 - a number or a tensor
    """Returns by what a sum over `size` ranks is multiplied for `op`; None: it is no sum."""
    kind, factor = kind_of(op)
    return {ReduceOp.SUM: 1.0, ReduceOp.AVG: 1.0 / size, ReduceOp.PREMUL_SUM: factor}.get(kind)
