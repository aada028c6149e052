"""Runs a whole cluster in a laboratory network: aggregators, sidecars and workers."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thalweg import _binaries
from thalweg._job._processes import Server, die_with_parent
from thalweg._settings import _config
from thalweg_bench.crew import Crew
from thalweg_bench.lab import Lab, format_rate
from thalweg_bench.place import Place
from thalweg_bench.resources import Process, Usage
from thalweg_bench.rows import count, exchange_bound, hosted_bound

_READY_SECONDS = 30.0
_SETUP_SECONDS = 60.0  # for what takes no noticeable time unless something hangs
START_DELAY = 0.05  # every worker learns of a start instant before it comes
_PORT = 7070


@dataclass(frozen=True)
class Shape:
    nodes: int
    shards: int  # 0: the sidecar of the only node aggregates
    workers: int  # per node
    rate: int | None  # of every link, in bits per second
    codec: str
    slow_factor: int = 1  # factor by which the last shard's link is slower
    weighted: bool = False  # true if weights say so, and not what the nodes measure
    local: bool = False  # true if every sidecar hosts a shard as well
    slow_node: int = 1  # factor by which the last node's link is slower

    def __str__(self) -> str:
        workers = "" if self.workers == 1 else f" x {self.workers} workers"
        shards = "embedded" if self.shards == 0 else count(self.shards, "shard")
        if self.slow_factor > 1:
            how = ", weighted" if self.weighted else ""
            shards += f" (one at 1/{self.slow_factor}{how})"
        if self.local:
            shards = f"local + {self.shards} shards"
        slow = f" (one at 1/{self.slow_node})" if self.slow_node > 1 else ""
        return f"{count(self.nodes, 'node')}{slow}{workers}, {shards}, {format_rate(self.rate)}"

    @property
    def slow_rate(self) -> int | None:
        return None if self.rate is None else self.rate // self.slow_factor

    def exchange_bound(self, wire_bytes: int, rate: float | None) -> float | None:
        """Returns the bound with links that really carry `rate`."""
        if self.local:
            return hosted_bound(wire_bytes, rate, self.nodes, self.shards, slow_node=self.slow_node)
        return exchange_bound(
            wire_bytes, rate, self.nodes, self.shards, slow_factor=self.slow_factor
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.workers


class Cluster:
    """Servers run from __enter__() on, workers from fork() on, all until __exit__(). One thread may
    use it.

    `http`: servers serve their metrics, each in its own namespace. `keeps`: aggregators have a
    folder for snapshots.
    """

    def __init__(self, shape: Shape, *, http: bool = False, keeps: bool = False) -> None:
        self.shape = shape
        self.nodes = [f"node{index}" for index in range(shape.nodes)]
        self.shards = [f"shard{index}" for index in range(shape.shards)]
        rates = dict.fromkeys(self.shards[-1:], shape.slow_rate)
        if shape.slow_node > 1 and shape.rate is not None:
            rates[self.nodes[-1]] = shape.rate // shape.slow_node
        self.lab = Lab([*self.nodes, *self.shards], shape.rate, rates=rates)
        self.crew = Crew()
        self.sockets: list[str] = []
        self.addresses: tuple[str, ...] = ()
        self._job = f"bench-{secrets.token_hex(4)}"
        self._secret = secrets.token_hex(32)
        self._http = http
        self._keeps = keeps
        self._servers: list[tuple[Server, str]] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lab)
            stack.callback(self._stop_servers)
            stack.callback(self.crew.kill)
            self._start_aggregators(stack)
            self._start_sidecars(stack)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._cleanup:
            if kind is None:
                self.crew.call("close", seconds=_SETUP_SECONDS)

    def fork(self, make: Callable[[int], object]) -> None:
        """Forks workers; `make(rank)` runs in the child. Import beforehand what it needs."""
        for rank in range(self.shape.ranks):
            node = self.nodes[rank // self.shape.workers]
            self.crew.fork(f"worker {rank} ({node})", lambda rank=rank: make(rank))  # type: ignore[misc]

    def place(self, rank: int) -> Place:
        shape = self.shape
        return Place(
            rank=rank,
            nodes=shape.nodes,
            workers=shape.workers,
            sidecar=self.sockets[rank // shape.workers],
            job=self._job,
            codec=shape.codec,
            shards=self._hosted_addresses() + self.addresses if shape.local else (),
            hosts=(*range(shape.nodes), *[-1] * shape.shards) if shape.local else (),
            secret=self._secret if shape.local else "",
        )

    def call(self, method: str, *arguments: object, seconds: float = _SETUP_SECONDS) -> None:
        """Calls the method in all workers at once. Raises BenchError."""
        self.crew.call(method, *arguments, seconds=seconds)

    def open(self, system: str, *arguments: object, seconds: float = _SETUP_SECONDS) -> None:
        """Opens the system in all workers at once. Raises BenchError."""
        self.call("offer", seconds=seconds)
        self.call("open", system, *arguments, seconds=seconds)
        self.call("end_offer", seconds=seconds)

    def measure(
        self, system: str, repeat: int, bound: float | None, usage: Usage | None = None
    ) -> float:
        """Returns the seconds from the first worker's begin to the last one's end; checks the
        result.

        A worker that takes much longer than `bound` seconds has hung: BenchError names it.
        """
        watchdog = watchdog_seconds(bound)
        self.call("prepare", system, repeat, seconds=watchdog)
        if usage is not None:
            usage.start()
        start = time.monotonic() + START_DELAY
        times: list[tuple[float, float]] = self.crew.call("run", system, start, seconds=watchdog)
        if usage is not None:
            usage.stop()
        self.call("check", system, seconds=watchdog)
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def server(self, name: str) -> Server:
        """Returns the server process of an aggregator, or of a node's sidecar."""
        return next(s for s, _ in self._servers if s.name in (name, f"{name}.sidecar"))

    def usage(self) -> Usage:
        """Returns the usage of all servers and workers."""
        processes = [
            Process(server.process.pid, server.name, kind) for server, kind in self._servers
        ]
        processes += [Process(pid, "worker", "worker") for pid in self.crew.pids]
        return Usage(processes)

    def _start_aggregators(self, stack: contextlib.ExitStack) -> None:
        binary = str(_binaries.find(_binaries.AGGREGATOR))
        self.addresses = tuple(f"{self.lab.address(name)}:{_PORT}" for name in self.shards)
        for name, address in zip(self.shards, self.addresses, strict=True):
            argv = [binary, "--listen", address]
            if self.shape.weighted and name != self.shards[-1]:
                argv += ["--weight", str(self.shape.slow_factor)]
            if self._keeps:
                argv += ["--state-dir", _folder(stack)]
            self._start(name, name, "aggregator", argv)
        self._await_ready()

    def _start_sidecars(self, stack: contextlib.ExitStack) -> None:
        binary = str(_binaries.find(_binaries.SIDECAR))
        for name in self.nodes:
            # Each sidecar has its own folder, which it removes also when this process is killed.
            path = str(Path(_folder(stack)) / "sidecar.sock")
            self.sockets.append(path)
            argv = [binary, "--socket", path, "--own-dir"]
            argv += ["--aggregators", ",".join(self.addresses)]
            if self.shape.local:
                argv += ["--shard-listen", f"{self.lab.address(name)}:{_PORT}"]
            self._start(f"{name}.sidecar", name, "sidecar", argv)
        self._await_ready()

    def _hosted_addresses(self) -> tuple[str, ...]:
        return tuple(f"{self.lab.address(name)}:{_PORT}" for name in self.nodes)

    def _start(self, name: str, namespace: str, kind: str, argv: list[str]) -> None:
        http = ["--http", "127.0.0.1:0"] if self._http else []
        server = Server(
            name,
            [*argv, *http, "--drain-seconds", "1"],
            env=_config.server_environment(log="warn"),
            preexec=self.lab.entering(namespace, die_with_parent(signal.SIGTERM)),
        )
        self._servers.append((server, kind))

    def _await_ready(self) -> None:
        for server, _ in self._servers:
            if not server.address:
                server.wait_ready(_READY_SECONDS)

    def _stop_servers(self) -> None:
        for server, _ in self._servers:
            server.process.terminate()
        for server, _ in self._servers:
            server.stop(grace=3)


def _folder(stack: contextlib.ExitStack) -> str:
    folder = tempfile.mkdtemp(prefix="thalweg-bench-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_installed() -> None:
    """Raises ConfigError when a server program is missing."""
    try:
        for program in (_binaries.AGGREGATOR, _binaries.SIDECAR):
            _binaries.find(program)
    except FileNotFoundError as error:
        raise _config.ConfigError(str(error)) from None


def watchdog_seconds(bound: float | None) -> float:
    return 20 * (bound or 0.0) + 60
