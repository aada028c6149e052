"""Reduces named tensors in a session without DistributedDataParallel, of which it only borrows the
buckets: nothing else makes a GradBucket, which the hook of the session takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Reducer, _register_comm_hook
from torch.futures import Future

from thalweg import _C


class Bucket:
    """Tensors whose means over a session's workers are taken together, in the session's codec.

    All workers make the same ones and call mean() in the same order. One thread at a time.
    """

    def __init__(
        self,
        session: _C.Session,
        bucket: GradBucket,
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        self._bucket = bucket
        self._parameters = parameters  # the hook knows them by their addresses
        self._hook = _C.DdpHook(session, list(parameters))
        self.elements = sum(parameter.numel() for _, parameter in parameters)

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean of `values`, float32 [elements], the tensors one after the other.

        The result is read-only memory that the node's workers share, until the next call. Blocks.
        RuntimeError: the job has failed.
        """
        [mean] = self.begin(values).wait()
        return mean

    def begin(self, values: Tensor) -> Future[list[Tensor]]:
        """Does so without blocking: the future has the mean. `values` may be used again at once."""
        self._bucket.set_buffer(values)
        try:
            return self._hook.run(self._bucket)
        finally:
            self._bucket.set_buffer(values[:0])


def make(
    session: _C.Session,
    layouts: Sequence[Sequence[tuple[str, torch.Size]]],
    group: dist.ProcessGroup,
) -> list[Bucket]:
    """Returns a bucket for each layout, which has the names and shapes of its tensors, none of them
    empty. Nothing is sent over `group`.
    """
    named = [
        [(name, nn.Parameter(torch.empty(shape, device="cpu"))) for name, shape in layout]
        for layout in layouts
    ]
    found = _borrow([[parameter for _, parameter in one] for one in named], group)
    return [Bucket(session, *pair) for pair in zip(found, named, strict=True)]


@torch.enable_grad()
def _borrow(
    buckets: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup
) -> list[GradBucket]:
    """Returns the buckets that a reducer of DistributedDataParallel makes of these parameters."""
    parameters: list[Tensor] = [one for bucket in buckets for one in bucket]
    numbers = iter(range(len(parameters)))
    indices = [[next(numbers) for _ in bucket] for bucket in buckets]
    found: list[GradBucket] = []

    def keep(_: object, bucket: GradBucket) -> Future[Tensor]:
        found.append(bucket)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    no_limits = [1 << 40] * len(buckets)
    reducer = Reducer(parameters, indices, no_limits, group, [False] * len(parameters))
    _register_comm_hook(reducer, None, keep)
    reducer.prepare_for_backward([])
    torch.autograd.backward(parameters, [torch.zeros_like(one) for one in parameters])
    for parameter in parameters:
        parameter.grad = None
    for bucket in found:
        bucket.set_buffer(torch.empty(0, device="cpu"))
    return sorted(found, key=lambda bucket: bucket.index())
