"""Implements a worker of a benchmark: a forked child that does what the parent says."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from thalweg import _C
from thalweg._settings._config import Config
from thalweg_bench.lab import INTERFACE, Lab
from thalweg_bench.place import Place
from thalweg_bench.rows import say

TIMEOUT = 120.0  # seconds without progress
_GLOO_PORT = 29500


class System(Protocol):
    """A system to measure. The time does not include prepare() and check()."""

    def prepare(self, repeat: int) -> None:
        """Makes the input, which `repeat` changes."""

    def run(self) -> None:
        """Is the measured part."""

    def check(self) -> None:
        """Raises BenchError when the result of run() is wrong."""

    def close(self) -> None:
        """Releases what it holds."""


Factories = Mapping[str, Callable[..., System]]  # by the systems' names


class Worker:
    """The parent calls its do_* methods. One thread may use it.

    `factories` make the systems, by name, from the place and the arguments of do_open().
    """

    def __init__(self, lab: Lab, place: Place, factories: Factories) -> None:
        lab.enter(f"node{place.node}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ["THALWEG_SIDECAR"] = place.sidecar  # ddp.attach() reads it
        self._place = place
        self._master = lab.address("node0")
        self._factories = factories
        self._systems: dict[str, System] = {}
        self._opened = 0
        self._offer: _C.ShardOffer | None = None

    def do_start_gloo(self) -> None:
        rank, size = self._place.rank, self._place.world_size
        address = f"tcp://{self._master}:{_GLOO_PORT}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)

    def do_offer(self) -> None:
        """Makes the node's sidecar host a shard for what is opened next."""
        place = self._next_place()
        if place.shards and place.local_rank == 0:
            self._offer = _C.ShardOffer(
                sidecar_path=place.sidecar, job=place.job, secret=place.secret, timeout=TIMEOUT
            )

    def do_open(self, name: str, *arguments: object) -> None:
        place = self._next_place()
        self._opened += 1
        self._systems[name] = self._factories[name](place, *arguments)

    def do_end_offer(self) -> None:
        if self._offer is not None:
            self._offer.close()

    def _next_place(self) -> Place:
        return replace(self._place, job=f"{self._place.job}-{self._opened + 1}")

    def do_prepare(self, name: str, repeat: int) -> None:
        self._systems[name].prepare(repeat)

    def do_run(self, name: str, start: float) -> tuple[float, float]:
        """Runs the system at an instant of CLOCK_MONOTONIC; returns when it began and ended."""
        system = self._systems[name]
        time.sleep(max(0.0, start - time.monotonic()))
        begin = time.monotonic()
        system.run()
        return begin, time.monotonic()

    def do_run_many(self, name: str, start: float, count: int) -> list[tuple[float, float]]:
        """Does the same `count` times; each result is checked before the next begins."""
        times = []
        for repeat in range(count):
            self.do_prepare(name, repeat)
            times.append(self.do_run(name, start))
            self.do_check(name)
        return times

    def do_check(self, name: str) -> None:
        self._systems[name].check()

    def do_close(self) -> None:
        for system in self._systems.values():
            system.close()
        self._systems.clear()


def open_session(place: Place) -> _C.Session:
    """Joins the job; rank 0 says how it uses its shards."""
    config = Config.from_env()
    session = _C.Session(
        sidecar_path=place.sidecar,
        job=place.job,
        rank=place.rank,
        world_size=place.world_size,
        node=place.node,
        num_nodes=place.nodes,
        node_name=f"{socket.gethostname()}-node{place.node}",
        local_rank=place.local_rank,
        local_size=place.workers,
        codec=place.codec,
        chunk_bytes=config.chunk_bytes,
        timeout=TIMEOUT,
        shards=list(place.shards),
        hosts=list(place.hosts),
        secret=place.secret,
    )
    if place.rank == 0 and (placement := session.placement()):
        say(placement)
    return session
