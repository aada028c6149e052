"""Sums and broadcasts among the workers of a node with torch's own collectives.

Sums and results have separate groups, so that a result need not wait for a gradient that some
worker has not computed yet. On GPUs the collectives are NCCL's, and nothing here waits for a GPU.
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

from thalweg._job._topology import Placement

Outcome = torch.futures.Future[torch.Tensor]

LEADER = 0  # local rank


class CollectiveError(RuntimeError):
    """A collective failed. Why is better known to whoever lost the connection to a worker."""


class _Group(Protocol):
    """The used part of torch's backends, whose types do not declare it."""

    def reduce(self, tensors: list[torch.Tensor], opts: ReduceOptions, /) -> Work: ...
    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions, /) -> Work: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...


class NodeSums:
    """One worker's part in the collectives. All workers of a node must call sum and spread equally
    often.

    Two threads may call `sum` and `spread`.
    """

    def __init__(
        self,
        store: Store,
        place: Placement,
        world_size: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        """Waits for the node's other workers. `store` is only theirs. Raises RuntimeError."""
        make: Any = dist.ProcessGroupGloo if device.type == "cpu" else dist.ProcessGroupNCCL
        who = (place.local_rank, place.local_size, timedelta(seconds=timeout))
        self._sums: _Group = make(PrefixStore("sums", store), *who)
        self._results: _Group = make(PrefixStore("results", store), *who)
        # All nodes have equal weight, so a node must submit the sum of its workers' gradients
        # divided by the *mean* number of workers; where all nodes have equally many, that is the
        # mean of its own.
        self._divisor = world_size / place.num_nodes
        self._ranks = ", ".join(map(str, place.ranks))
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {name: torch.cuda.Stream(device) for name in ("up", "down")}
        self._try_out(place.local_size)

    def _try_out(self, local_size: int) -> None:
        """Makes NCCL connect now: it does so at its first use, which must not be in a backward."""
        one = torch.ones(1, device=self._device)
        self.wait(self._sum(one))
        self.wait(self.spread(one))
        if one.item() != local_size:
            raise RuntimeError(f"thalweg: {local_size} workers of this node sum up to {one.item()}")

    def sum(self, gradient: torch.Tensor) -> Work:
        """Replaces the leader's `gradient` by this node's share of the mean over all workers.

        The followers' gradients are overwritten. Divides before it sums: fp16 does not overflow
        where the mean would not. Raises RuntimeError.
        """
        if gradient.is_sparse:
            raise RuntimeError(
                "thalweg: a gradient bucket is sparse, which is not supported: use dense gradients "
                "(for torch.nn.Embedding, sparse=False)"
            )
        return self._sum(gradient.div_(self._divisor))

    def _sum(self, tensor: torch.Tensor) -> Work:
        options = ReduceOptions()  # its operation is a sum
        options.rootRank = LEADER
        options.asyncOp = True
        return self._sums.reduce([tensor], options)

    def spread(self, result: torch.Tensor) -> Work:
        """Copies the leader's tensor to all workers' tensors."""
        options = BroadcastOptions()
        options.rootRank = LEADER
        options.rootTensor = 0
        options.asyncOp = True
        return self._results.broadcast([result], options)

    def wait(self, work: Work) -> None:
        """Waits for `work`; on a GPU, only the current stream waits. Raises CollectiveError."""
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"thalweg: a collective of rank {self._ranks}, a node's workers, failed: {error}"
            ) from error

    def on_the_way(self, direction: str) -> AbstractContextManager[object]:
        """Makes the current stream one of the node's, on GPUs: "up" to the sidecar or "down" from
        it.
        """
        stream = self._streams.get(direction)
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def make_outcome(self) -> Outcome:
        """Returns a future for DDP; if completed within on_the_way(), it makes DDP's streams wait
        too.
        """
        return torch.futures.Future(devices=[] if self._device.type == "cpu" else [self._device])

    def end(self, orderly: bool) -> None:
        """Stops all sums and results. Call it once.

        NCCL's orderly end, with nothing in flight, waits for the other workers'; otherwise what is
        in flight is aborted.
        """
        for group in (self._sums, self._results):
            with contextlib.suppress(RuntimeError):  # torch has logged it
                if orderly:
                    group.shutdown()
                else:
                    group.abort()
        # Gloo's threads end with these objects and not with the process
        del self._sums, self._results
