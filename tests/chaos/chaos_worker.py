"""A worker of the job that chaos.py disturbs: it checks every bit of every round."""

from __future__ import annotations

import contextlib
import mmap
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import numpy as np
import torch
from averaging import Averaging

from thalweg import _C

NODES, LOCAL = 4, 2
WORLD = NODES * LOCAL
SIZES = (40_000, 3_001)  # elements of a round's buckets
CHUNK_BYTES = 8192
TIMEOUT = 8.0  # THALWEG_TIMEOUT of the job
FOREVER = 1 << 40


class Progress:
    """How many rounds each worker has completed in this attempt, in memory that forked processes
    share; and the round after which all end.
    """

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * (WORLD + 1)), dtype=np.int64)

    def begin(self) -> None:
        self._words[:] = 0
        self._words[WORLD] = FOREVER

    def end_soon(self) -> None:
        """Makes all workers end after the same round, which none of them has begun."""
        self._words[WORLD] = int(self._words[:WORLD].max()) + 3

    def is_last(self, done: int) -> bool:
        return done >= int(self._words[WORLD])

    def note(self, rank: int, done: int) -> None:
        self._words[rank] = done

    def of(self, rank: int) -> int:
        return int(self._words[rank])

    def least(self) -> int:
        return int(self._words[:WORLD].min())


@dataclass(frozen=True)
class Terms:
    """What all workers of an attempt know."""

    job: str
    secret: str
    seed: int
    shards: list[str]
    hosts: list[int]  # by shard, the node whose sidecar hosts it, or -1


def gradient(seed: int, rank: int, done: int) -> np.ndarray:
    """Returns a round's gradient: that of all buckets, one after the other."""
    return np.random.default_rng([seed, rank, done]).standard_normal(sum(SIZES), dtype=np.float32)


def expected_mean(seed: int, done: int) -> np.ndarray:
    """Returns the sum in float32 of the nodes' means in the nodes' order, divided by their number.

    Both numbers are powers of two, so that dividing changes no bit.
    """
    total = np.zeros(sum(SIZES), dtype=np.float32)
    for node in range(NODES):
        of_node = [gradient(seed, node * LOCAL + local, done) for local in range(LOCAL)]
        total += sum(of_node[1:], of_node[0]) / np.float32(LOCAL)
    total /= np.float32(NODES)
    return total


@dataclass
class Worker:
    """Serves calls of its parent: offer(), train() and retire(), each of which is answered with
    (outcome, text).
    """

    rank: int
    sidecar: str
    progress: Progress
    pipe: Connection
    _offer: Any = field(default=None)

    def serve(self) -> None:
        torch.set_num_threads(1)
        while True:
            call, terms = self.pipe.recv()
            try:
                answer = {"offer": self.offer, "train": self.train}[call](terms)
            except (RuntimeError, OSError, ValueError) as error:
                answer = ("failed", str(error))
            self.pipe.send(answer)

    def offer(self, terms: Terms) -> tuple[str, str]:
        """Makes the node's sidecar host a shard, if it is one that the job has."""
        if self.rank % LOCAL == 0 and self.rank // LOCAL in terms.hosts:
            self._offer = _C.ShardOffer(
                sidecar_path=self.sidecar, job=terms.job, secret=terms.secret, timeout=TIMEOUT
            )
        return "offered", ""

    def train(self, terms: Terms) -> tuple[str, str]:
        node, local_rank = divmod(self.rank, LOCAL)
        with contextlib.ExitStack() as stack:
            if self._offer is not None:
                stack.callback(self._offer.close)
                self._offer = None
            session = _C.Session(
                sidecar_path=self.sidecar,
                job=terms.job,
                rank=self.rank,
                world_size=WORLD,
                node=node,
                num_nodes=NODES,
                node_name=f"host{node}",
                local_rank=local_rank,
                local_size=LOCAL,
                codec="fp32",
                chunk_bytes=CHUNK_BYTES,
                timeout=TIMEOUT,
                shards=terms.shards,
                hosts=terms.hosts,
                secret=terms.secret,
            )
            stack.callback(session.close)
            return self._rounds(Averaging(session, SIZES), terms.seed)

    def _rounds(self, average: Averaging, seed: int) -> tuple[str, str]:
        done = 0
        while not self.progress.is_last(done):
            mine = torch.from_numpy(gradient(seed, self.rank, done)).split(SIZES)
            mean = torch.cat(average.means(mine)).numpy()
            wrong = int((mean.view(np.uint32) != expected_mean(seed, done).view(np.uint32)).sum())
            if wrong:
                return "wrong", f"round {done}: {wrong} of {mean.size} elements differ"
            done += 1
            self.progress.note(self.rank, done)
        return "ended", ""
