"""Averages tensors as training does: as gradients, by DDP's reducer and the hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from thalweg import _C

_ANY_SIZE = 1 << 40


class Averaging:
    """Means of float32 tensors over a session's workers, each tensor in a bucket of its own."""

    def __init__(self, session: _C.Session, sizes: Sequence[int]) -> None:
        """`sizes` are the tensors' numbers of elements, the same on all workers."""
        self._parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        # With a hook, the reducer asks nothing of its process group.
        self._reducer = dist.Reducer(
            self._parameters,
            [[number] for number in range(len(sizes))],
            [_ANY_SIZE] * len(sizes),
            dist.ProcessGroup(0, 1),
        )
        names = [f"tensor{number}" for number in range(len(sizes))]
        session.attach(self._reducer, list(zip(names, self._parameters, strict=True)))

    def means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor's mean; all workers call it equally often. Raises RuntimeError."""
        self._reducer.prepare_for_forward()
        self._reducer.prepare_for_backward([])
        pairs = zip(self._parameters, tensors, strict=True)
        sum((parameter * tensor).sum() for parameter, tensor in pairs).backward()
        means = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return means
