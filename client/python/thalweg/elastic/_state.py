"""What a training carries from one membership to the next, and who has it newest."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thalweg.elastic._membership import Membership


class _Interrupted(Exception):
    """This worker begins another membership, because nodes have come."""


class State:
    """Objects and values of a training, as attributes; those of the last commit are kept.

    Objects have state_dict() and load_state_dict(), like a model, an optimizer, a scheduler or
    thalweg.elastic.Sampler. A value, like an epoch's number, is anything that can be copied and
    stored by torch.save.
    """

    membership: Membership | None = None  # None: not in run()
    commits: int = 0  # commits so far, in all memberships

    if TYPE_CHECKING:  # its parts have any names

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401
        def __setattr__(self, name: str, value: Any) -> None: ...  # noqa: ANN401

    def __init__(self, **parts: Any) -> None:  # noqa: ANN401 - objects and values of any type
        for name in parts:
            if hasattr(type(self), name):
                raise ValueError(f"thalweg: a State has {name!r} already: take another name")
        self._names = tuple(parts)
        self._listeners: list[Callable[[Membership], None]] = []
        self._has_comers: Callable[[], bool] = lambda: False
        self.__dict__.update(parts)
        self._kept: dict[str, Any] = {}
        self._keep()

    def commit(self) -> None:
        """Keeps all parts as they are now: from here the training goes on when nodes are lost.

        Call it on all workers at the same place, after a step of the optimizer. Costs a copy of
        what the parts' state_dict() return. Where nodes have come it does not return: train() is
        called again, with them.
        """
        self._keep()
        self.commits += 1
        if self._has_comers():
            raise _Interrupted

    def restore(self) -> None:
        """Sets all parts to what they were at the last commit."""
        for name, kept in self._kept.items():
            part = getattr(self, name)
            if _is_object(part) and kept is not None:
                part.load_state_dict(_copy(kept, None))  # optimizers keep what they are given
            else:
                setattr(self, name, copy.deepcopy(kept))

    def on_change(self, listener: Callable[[Membership], None]) -> None:
        """Calls `listener` on every worker when a membership begins, before train(): it may set the
        learning rate for as many workers.
        """
        self._listeners.append(listener)

    def state_dict(self) -> dict[str, Any]:
        """Returns the last commit, for a checkpoint."""
        return {"commits": self.commits, "parts": self._kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a checkpoint. Nodes that load different ones get the one with most commits."""
        self._load(state_dict)
        self.restore()

    def _keep(self) -> None:
        parts = {name: getattr(self, name) for name in self._names}
        # Where one of them fails, nothing of the last commit has changed.
        values = {n: part.state_dict() if _is_object(part) else part for n, part in parts.items()}
        self._kept = _copy(values, self._kept)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        if set(state_dict["parts"]) != set(self._names):
            saved = ", ".join(sorted(state_dict["parts"]))
            raise ValueError(
                f"thalweg: the state was saved with {saved}, this one has "
                f"{', '.join(sorted(self._names))}"
            )
        self._kept = _copy(state_dict["parts"], None)
        self.commits = state_dict["commits"]

    def _begin(
        self, membership: Membership, generation: int, has_comers: Callable[[], bool]
    ) -> None:
        """Takes the newest state of all workers, which call it together.

        `generation` is that of this worker's state.
        """
        self._has_comers = has_comers
        standings: list[tuple[int, int]] = [(0, 0)] * membership.world_size
        dist.all_gather_object(standings, (generation, self.commits))
        # A node's first worker has the codec's part, too: it precedes others with as many commits.
        self._send(standings.index(max(standings)))
        self.restore()
        self.membership = membership
        for listener in self._listeners:
            listener(membership)

    def _send(self, root: int) -> None:
        is_root = dist.get_rank() == root
        file = io.BytesIO()
        if is_root:
            torch.save(self.state_dict(), file)
        size = torch.tensor([file.getbuffer().nbytes])
        dist.broadcast(size, root)
        content = torch.empty(int(size), dtype=torch.uint8)
        if is_root:
            content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        dist.broadcast(content, root)
        if not is_root:
            file = io.BytesIO(content.numpy().tobytes())
            # The other worker's GPU may have another number here.
            self._load(torch.load(file, map_location="cpu", weights_only=False))


def _is_object(part: object) -> bool:
    return callable(getattr(part, "load_state_dict", None))


def _copy(value: Any, last: Any) -> Any:  # noqa: ANN401 - trees of any type
    """Returns a copy of a tree, in the tensors of an earlier copy where they fit."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(last, torch.Tensor) and (
            (last.shape, last.dtype, last.device) == (value.shape, value.dtype, value.device)
        )
        return last.copy_(value.detach()) if fits else value.detach().clone()
    if isinstance(value, dict):
        before = last if isinstance(last, dict) else {}
        result = copy.copy(value)  # a module's has versions beside its entries
        result.update({key: _copy(one, before.get(key)) for key, one in value.items()})
        return result
    if type(value) is list:
        places = last if type(last) is list and len(last) == len(value) else [None] * len(value)
        return [_copy(one, old) for one, old in zip(value, places, strict=True)]
    return copy.deepcopy(value)
