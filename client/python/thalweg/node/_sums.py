"""Sums and broadcasts among the workers of a node, by torch's own collectives.

Sums and results have a group each, so that a result need not wait for a gradient that some worker
has not made yet. On GPUs they are NCCL's, and nothing here waits for a GPU.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ReduceOptions,
    Store,
    Work,
)

from thalweg._topology import Placement

Outcome = torch.futures.Future[torch.Tensor]

LEADER = 0  # local rank


class _Group(Protocol):
    """What is used of torch's backends, whose types do not say it."""

    def reduce(self, tensors: list[torch.Tensor], opts: ReduceOptions, /) -> Work: ...
    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions, /) -> Work: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class NodeSums:
    """One worker's part in them. All workers of a node call each of sum and spread equally often.

    `sum` and `spread` may be called by two threads.
    """

    def __init__(
        self,
        store: Store,
        place: Placement,
        world_size: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Waits for the node's other workers. `store` is theirs alone. Raises RuntimeError."""
        make: Any = dist.ProcessGroupGloo if device.type == "cpu" else dist.ProcessGroupNCCL
        who = (place.local_rank, place.local_size, timedelta(seconds=timeout))
        self._sums: _Group = make(PrefixStore("sums", store), *who)
        self._results: _Group = make(PrefixStore("results", store), *who)
        # What a node hands over counts as much as any other node's, so it must be the sum of its
        # workers' gradients by the *mean* number of workers; where all nodes have as many, that is
        # the mean of its own.
        self._divisor = world_size / place.num_nodes
        me = place.ranks[place.local_rank]
        self._others = ", ".join(str(rank) for rank in place.ranks if rank != me)
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {name: torch.cuda.Stream(device) for name in ("up", "down")}
        self._try_out(place.local_size)

    def _try_out(self, local_size: int) -> None:
        """NCCL connects only when it is used first, which must not be in a backward pass."""
        one = torch.ones(1, device=self._device)
        self.wait(self._sum(one))
        self.wait(self.spread(one))
        if one.item() != local_size:
            raise RuntimeError(f"thalweg: {local_size} workers of this node sum up to {one.item()}")

    def sum(self, gradient: torch.Tensor) -> Work:
        """Replaces the leader's `gradient` by this node's share of the mean over all workers.

        The followers' is lost. Divides before it sums: fp16 does not overflow where the mean
        would not. Raises RuntimeError.
        """
        if gradient.is_sparse:
            raise RuntimeError(
                "thalweg: a gradient bucket is sparse, which is not supported: use dense gradients "
                "(for torch.nn.Embedding, sparse=False)"
            )
        return self._sum(gradient.div_(self._divisor))

    def _sum(self, tensor: torch.Tensor) -> Work:
        options = ReduceOptions()  # whose operation is the sum
        options.rootRank = LEADER
        options.asyncOp = True
        return self._sums.reduce([tensor], options)

    def spread(self, result: torch.Tensor) -> Work:
        """Fills all workers' tensors with the leader's."""
        options = BroadcastOptions()
        options.rootRank = LEADER
        options.rootTensor = 0
        options.asyncOp = True
        return self._results.broadcast([result], options)

    def wait(self, work: Work) -> None:
        """On a GPU, only the current stream waits. Raises RuntimeError."""
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"thalweg: a collective with rank {self._others} of this node failed: {error}"
            ) from error

    def on_the_way(self, direction: str) -> AbstractContextManager[object]:
        """In it, the current stream is one of the node's, on GPUs: "up" to the sidecar or "down"
        from it."""
        stream = self._streams.get(direction)
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def make_outcome(self) -> Outcome:
        """A future for DDP; completed within on_the_way(), it has DDP's streams wait as well."""
        return torch.futures.Future(devices=[] if self._device.type == "cpu" else [self._device])

    def end(self, orderly: bool) -> None:
        """Nothing is summed or spread from now on. To be called once.

        NCCL's end in order, with nothing on its way, waits for the other workers'; otherwise what
        is on its way is given up.
        """
        for group in (self._sums, self._results):
            with contextlib.suppress(RuntimeError):  # which torch has logged
                if orderly:
                    group.shutdown()
                else:
                    group.abort()
        del self._sums, self._results  # Gloo's threads end with them, and not with the process
