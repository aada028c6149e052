"""Which parameters a step is of, where backward passes need not reach all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from thalweg.ps._parameters import Parameter


class Used:
    """The parameters that have a gradient on some worker, from one worker's side."""

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[Parameter]) -> None:
        self._group = group
        self._parameters = parameters
        self._here: set[int] = set()  # ids of those that have one on this worker
        self._flags: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_asked(self) -> bool:
        """Whether this worker has asked in this step."""
        return self._flags is not None

    def note(self, parameter: Parameter) -> None:
        """The parameter has a gradient on this worker."""
        self._here.add(id(parameter.tensor))

    def ask(self) -> None:
        """This worker has noted all that it will in this step. All workers call it."""
        flags = [id(each.tensor) in self._here for each in self._parameters]
        self._here.clear()
        device = self._parameters[0].tensor.device  # the group has broadcast from it
        self._flags = torch.tensor(flags, dtype=torch.int32, device=device)
        self._work = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def answer(self) -> frozenset[int]:
        """Waits for the others; returns the ids of the parameters that somebody has noted."""
        assert self._flags is not None
        if self._work is not None:
            self._work.wait()
        flags = self._flags.tolist()
        return frozenset(
            id(each.tensor)
            for each, is_used in zip(self._parameters, flags, strict=True)
            if is_used
        )

    def forget(self) -> None:
        """Lets the next step begin."""
        self._here.clear()
        self._flags = self._work = None
