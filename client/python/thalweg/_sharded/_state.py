"""Defines what thalweg.fsdp.compress() returns."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from thalweg._attach._state import State
from thalweg._sharded._comms import CompressedReduceScatter
from thalweg._torch import _precision

_log = logging.getLogger("thalweg")


class Size(NamedTuple):
    """Says how many workers a job has, and how they lie on nodes."""

    text: str  # the same on all ranks
    formerly: str  # what states of earlier versions have in its place


class Compression:
    """What a sharded model's codecs carry from step to step; compress() returns it.

    `codec` is that of gradients, `gather` that of parameters, as text. `copies` has the state of
    the job that sums gradients over copies of this rank's shards on other nodes, with its codec and
    statistics; it is empty where there are none, or where the sums are exact.
    """

    def __init__(
        self,
        codec: str,
        gather: str,
        size: Size,
        reduces: dict[str, CompressedReduceScatter],
        copies: Sequence[tuple[State, dist.ProcessGroup]],
    ) -> None:
        """`copies` has jobs with their ranks."""
        self.codec = codec
        self.gather = gather
        self.copies = tuple(state for state, _ in copies)
        self._groups = [group for _, group in copies]
        self._size = size
        self._reduces = reduces
        self._loss_scale = 1.0  # that of what is held back
        _precision.watch(self)

    @property
    def residual_bytes(self) -> int:
        """How many bytes of gradients this rank holds back for later steps, without what the
        node's sidecar holds back of sums over copies.
        """
        return sum(one.residual.nbytes for one in self._reduces.values())

    @property
    def nonfinite_elems(self) -> int:
        """How many elements of sums over shards, as this rank got them, were NaN or infinite since
        compress(). What becomes so in sums over copies is in the statistics of `copies`.
        """
        return sum(one.nonfinite_elems for one in self._reduces.values())

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """Hears of loss scalers: what is held back has the scale of the gradients to come."""
        if not (loss_scale > 0 and math.isfinite(loss_scale)):
            return
        if loss_scale != self._loss_scale:
            for one in self._reduces.values():
                _multiply(one.residual, loss_scale / self._loss_scale)
        self._loss_scale = loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Returns what is held back of gradients, for a checkpoint: call it between two steps.

        "codec" and "saved_by" are the same on all ranks, and so is "rounds", by unit. "rankN of …"
        has float32 tensors by unit, without loss scale, and "copiesN of …" what State.state_dict()
        returns of each job of `copies`; only rank N has them, so that every rank's own result must
        be stored, as torch.distributed.checkpoint does. Their names end with "saved_by": in another
        job they are missing, where tensors of other sizes would fail that checkpoint's load().
        RuntimeError: such a job has failed.
        """
        _precision.settle()
        held = {name: one.residual / self._loss_scale for name, one in self._reduces.items()}
        own, own_copies = self._names(self._size.text)
        return {
            "codec": self.codec,
            "saved_by": self._size.text,
            "rounds": {name: one.rounds for name, one in self._reduces.items()},
            own: held,
            own_copies: {
                str(number): state.state_dict() for number, state in enumerate(self.copies)
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; with model and optimizer restored, training goes on bit for bit.

        All ranks call it before the first step. Where it was saved by another number of workers or
        nodes, has nothing of this rank or is of other units, what is held back begins at zero. So
        it does on all ranks of a sum over copies, and the codec there at its first step, if that
        is so on one of them. The log says it. Raises ValueError if it belongs to another codec.
        """
        saved = str(state_dict.get("codec", ""))
        if saved != self.codec:
            raise ValueError(
                f"thalweg: the state was saved with codec {saved!r}, and {self.codec!r} is in use"
            )
        lost = self._what_is_lost(state_dict)
        own, own_copies = self._names(state_dict.get("saved_by", ""))
        for name, one in self._reduces.items():
            one.rounds = int(state_dict.get("rounds", {}).get(name, 0))
            if lost:
                one.residual.zero_()
            else:
                _multiply(one.residual.copy_(state_dict[own][name]), self._loss_scale)
        if lost:
            _log.warning("thalweg: %s: what is held back of gradients begins at zero", lost)
        for number, (state, group) in enumerate(zip(self.copies, self._groups, strict=True)):
            lost_by = _first_of(lost, group)
            if not lost_by:
                state.load_state_dict(state_dict[own_copies][str(number)])
            elif not lost:
                _log.warning(
                    "thalweg: %s: what is held back of sums over copies begins at zero", lost_by
                )

    def _what_is_lost(self, state: Mapping[str, Any]) -> str:
        """Returns why this rank cannot take what was held back from a state; empty: it can."""
        then = state.get("saved_by", "")
        if then not in self._size:
            return f"the state was saved by {then}, and this job has {self._size.text}"
        own, own_copies = self._names(then)
        if own not in state or (self.copies and own_copies not in state):
            return f"the state has nothing of rank {dist.get_rank()}"
        held: Mapping[str, Tensor] = state[own]
        shapes = {name: one.residual.shape for name, one in self._reduces.items()}
        if {name: tensor.shape for name, tensor in held.items()} != shapes:
            return "the state is of other units"
        if len(state.get(own_copies, ())) != len(self.copies):
            return "the state is of other copies"
        return ""

    def close(self) -> None:
        """Ends the jobs of `copies`; backward() fails from then on. May be called again."""
        for state in self.copies:
            state.close()

    def _names(self, saved_by: str) -> tuple[str, str]:
        """Returns by what names this rank's own parts are in a state."""
        names = (f"rank{dist.get_rank()}", f"copies{dist.get_rank()}")
        if saved_by == self._size.formerly:
            return names
        return f"{names[0]} of {saved_by}", f"{names[1]} of {saved_by}"


def _multiply(residual: Tensor, factor: float) -> None:
    """Makes zero what is not finite then: it would never leave the gradients again."""
    residual.mul_(factor).nan_to_num_(0.0, 0.0, 0.0)


def _first_of(lost: str, group: dist.ProcessGroup) -> str:
    """Returns why a rank of the group has lost its state, as they must count steps alike."""
    of_all = [""] * group.size()
    dist.all_gather_object(of_all, lost, group=group)
    return next(filter(None, of_all), "")
