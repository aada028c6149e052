"""Runs a node whose workers are threads, over Gloo, with a session that tests control."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
import torch.distributed as dist

from thalweg._job._topology import Placement
from thalweg.node._follower import Follower
from thalweg.node._leader import Leader
from thalweg.node._sums import NodeSums
from thalweg.node._waits import Waits, look_interval
from thalweg.node._words import Line

TIMEOUT = 20.0  # for waits that should never time out
ELEMS = 1000


class Session:
    """A session that counts its calls and can be made to fail."""

    def __init__(self) -> None:
        self.rounds = 0
        self.reason: str | None = None
        self.closed = threading.Event()

    def stats(self) -> dict[str, float]:
        return {"rounds": self.rounds}

    def placement(self) -> str:
        return "2 shards sum equal shares"

    def lost_nodes(self) -> list[str]:
        return []

    def path(self) -> str:
        return "cpu"

    def status(self) -> str | None:
        return self.reason

    def close(self) -> None:
        self.closed.set()


class Hook:
    """A hook that keeps its buckets until `answer` is called, in any order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._futures: dict[int, torch.futures.Future] = {}
        self._handed = threading.Condition()
        self.order: list[int] = []

    def run(self, bucket) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        with self._handed:
            self.order.append(bucket.index())
            self._futures[bucket.index()] = (future, bucket.buffer().clone())
            self._handed.notify_all()
        return future

    def answer(self, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Completes the bucket's round, once it is submitted, with what `change` makes of it."""
        with self._handed:
            assert self._handed.wait_for(lambda: index in self._futures, TIMEOUT)
            future, gradient = self._futures.pop(index)
        self._session.rounds += 1
        try:
            result = change(gradient)
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result([result])


def bucket(index: int, values: torch.Tensor, last: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        index=lambda: index, buffer=lambda: values, is_last=lambda: last, parameters=list
    )


def make_sums(size: int, nodes: int = 1, world: int | None = None) -> list[NodeSums]:
    """Returns the sums of all workers of the node, by local rank."""
    store = dist.HashStore()

    def make(local_rank: int) -> NodeSums:
        place = Placement(0, nodes, local_rank, tuple(range(size)))
        return NodeSums(store, place, world or size * nodes, torch.device("cpu"), TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


class Node:
    """One leader and its followers; `lines` are the followers' ends of their connections."""

    def __init__(self, size: int, timeout: float, step_timeout: float) -> None:
        sums = make_sums(size)
        pairs = [socket.socketpair() for _ in range(size - 1)]
        self.lines = [Line(theirs) for _, theirs in pairs]
        self.session = Session()
        self.hook = Hook(self.session)
        followers = {rank + 1: Line(ours) for rank, (ours, _) in enumerate(pairs)}
        self.waits = Waits(range(size), step_timeout)
        interval = look_interval(timeout, step_timeout)
        self.leader = Leader(
            self.session,  # type: ignore[arg-type]
            self.hook,  # type: ignore[arg-type]
            sums[0],
            followers,
            waits=self.waits,
            timeout=timeout,
            look_interval=interval,
        )
        self.followers = [
            Follower(line, of_one, 0, timeout, interval)
            for line, of_one in zip(self.lines, sums[1:], strict=True)
        ]

    @property
    def members(self) -> list[Leader | Follower]:
        return [self.leader, *self.followers]

    def backward(self, index: int, last: bool = False) -> list[torch.futures.Future]:
        """Submits a bucket on all workers: worker r's is `gradient(index, r)`."""
        return [
            member.run_hook(bucket(index, gradient(index, rank), last))  # type: ignore[arg-type]
            for rank, member in enumerate(self.members)
        ]

    def close(self) -> None:
        for member in self.members:
            member.close()


def gradient(index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(ELEMS, generator=generator)


@contextlib.contextmanager
def node(size: int, timeout: float = TIMEOUT, step_timeout: float = 100 * TIMEOUT):
    made = Node(size, timeout, step_timeout)
    try:
        yield made
    finally:
        made.close()
