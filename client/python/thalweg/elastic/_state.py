"""What a training carries from one membership to the next, and who has it newest."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thalweg._attach._resuming import KEY
from thalweg.elastic._membership import Membership


class _Interrupted(BaseException):
    """This worker begins another membership, because nodes have come.

    It is no Exception: a training loop may catch those, log them and go on.
    """


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
            raise _Interrupted("thalweg: nodes have come: train() is to be called again, with them")

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
        """Returns a copy of the last commit, for a checkpoint."""
        return {"commits": self.commits, "parts": _copy(self._kept, None)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a checkpoint. Nodes that load different ones get the one with most commits."""
        self._load(state_dict)
        self.restore()

    def _keep(self) -> None:
        parts = {name: getattr(self, name) for name in self._names}
        values = {n: part.state_dict() if _is_object(part) else part for n, part in parts.items()}
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        kept = _copy(values, self._kept, written)
        # Where something above fails, nothing of the last commit has changed.
        for target, value in written:
            target.copy_(value)
        self._kept = kept

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
        standings: list[tuple[int, int, bool]] = [(0, 0, False)] * membership.world_size
        # A node's first worker has the codec's part, too: it precedes others with as many commits.
        has_codecs = any(isinstance(kept, dict) and KEY in kept for kept in self._kept.values())
        dist.all_gather_object(standings, (generation, self.commits, has_codecs))
        self._send(standings.index(max(standings)))
        self.restore()
        self.membership = membership
        for listener in self._listeners:
            listener(membership)

    def _send(self, root: int) -> None:
        is_root = dist.get_rank() == root
        file = io.BytesIO()
        if is_root:
            torch.save({"commits": self.commits, "parts": self._kept}, file)
        size = torch.tensor([file.getbuffer().nbytes], device="cpu")
        dist.broadcast(size, root)
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if is_root:
            content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        dist.broadcast(content, root)
        if not is_root:
            file = io.BytesIO(content.numpy().tobytes())
            # The other worker's GPU may have another number here.
            self._load(torch.load(file, map_location="cpu", weights_only=False))


def _is_object(part: object) -> bool:
    return callable(getattr(part, "load_state_dict", None))


def _copy(
    value: Any,  # noqa: ANN401 - trees of any type
    last: Any,  # noqa: ANN401
    written: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Any:  # noqa: ANN401
    """Returns a copy of a tree, in the tensors of an earlier copy where they fit.

    These are in `written` with what the caller is to write into them.
    """
    if isinstance(value, torch.Tensor):
        fits = isinstance(last, torch.Tensor) and (
            (last.shape, last.dtype, last.device) == (value.shape, value.dtype, value.device)
        )
        if not fits or written is None:
            return value.detach().clone()
        written.append((last, value.detach()))
        return last
    if isinstance(value, dict):
        before = last if isinstance(last, dict) else {}
        result = copy.copy(value)  # a module's has versions beside its entries
        for key, one in value.items():  # update() of a subclass may do something else
            result[key] = _copy(one, before.get(key), written)
        return result
    if type(value) is list:
        places = last if type(last) is list and len(last) == len(value) else [None] * len(value)
        return [_copy(one, old, written) for one, old in zip(value, places, strict=True)]
    return copy.deepcopy(value)
