"""Runs a whole cluster in a laboratory network: aggregators, sidecars and workers."""

from __future__ import annotations

import contextlib
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg import _binaries
from thalweg._job._processes import Server, die_with_parent
from thalweg._settings import _config
from thalweg_bench.crew import Crew
from thalweg_bench.lab import Lab
from thalweg_bench.place import Place
from thalweg_bench.resources import Usage
from thalweg_bench.rows import count, say
from thalweg_bench.shape import Shape
from thalweg_bench.torch_import import import_torch

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories

_READY_SECONDS = 30.0
SETUP_SECONDS = 60.0  # for what takes no noticeable time unless something hangs
_START_DELAY = 0.05  # every worker learns of a start instant before it comes
_MOST_SECONDS = 0.01  # of one of many small runs; the watchdog allows a multiple
_PORT = 7070


class Cluster:
    """Servers run from __enter__() on, workers from start() on, all until __exit__(). One thread
    may use it.

    `http`: servers serve their metrics, each in its own namespace. `keeps`: aggregators have a
    folder for snapshots.
    """

    def __init__(
        self, shape: Shape, codec: str, *, http: bool = False, keeps: bool = False
    ) -> None:
        self.shape = shape
        self.nodes = [f"node{index}" for index in range(shape.nodes)]
        self.shards = [f"shard{index}" for index in range(shape.shards)]
        slow = [(self.shards[-1:], shape.slow_shard), (self.nodes[-1:], shape.slow_node)]
        rates = {n[0]: shape.rate and shape.rate // factor for n, factor in slow if n}
        self.lab = Lab([*self.nodes, *self.shards], shape.rate, rates=rates)
        self.crew = Crew()
        self.sockets: list[str] = []
        self._codec = codec
        self._job = f"bench-{secrets.token_hex(4)}"
        self._secret = secrets.token_hex(32)
        self._http = http
        self._keeps = keeps
        self._servers: dict[str, list[Server]] = {"aggregator": [], "sidecar": []}
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                self.call("close")

    def start(self, make: Callable[[], Factories], *, gloo: bool) -> None:
        """Forks workers, with the systems that `make` returns once torch is imported; gives them
        torch's process group over Gloo if asked for.
        """
        say(f"{count(len(self.shards), 'aggregator')}, {count(len(self.nodes), 'sidecar')} ready")
        import_torch()
        from thalweg_bench.worker import Worker

        systems = make()
        self.fork(lambda rank: Worker(self.lab, self.place(rank), systems))
        if gloo:
            self.call("start_gloo")

    def fork(self, make: Callable[[int], object]) -> None:
        """Forks workers; `make(rank)` runs in the child. Import beforehand what it needs."""
        for rank in range(self.shape.ranks):
            node = self.nodes[rank // self.shape.workers]
            self.crew.fork(f"worker {rank} ({node})", lambda rank=rank: make(rank))  # type: ignore[misc]

    def place(self, rank: int) -> Place:
        shape, local = self.shape, self.shape.local
        return Place(
            rank=rank,
            nodes=shape.nodes,
            workers=shape.workers,
            sidecar=self.sockets[rank // shape.workers],
            job=self._job,
            codec=self._codec,
            shards=tuple(map(self._address, (*self.nodes, *self.shards))) if local else (),
            hosts=(*range(shape.nodes), *[-1] * shape.shards) if local else (),
            secret=self._secret if local else "",
        )

    def call(self, method: str, *arguments: object, seconds: float = SETUP_SECONDS) -> None:
        """Calls the method in all workers at once. Raises BenchError."""
        self.crew.call(method, *arguments, seconds=seconds)

    def open(
        self, system: str, *arguments: object, seconds: float = SETUP_SECONDS, offers: bool = True
    ) -> None:
        """Opens the system in all workers at once; with `offers`, sidecars are told beforehand to
        host a shard if they all do. Raises BenchError.
        """
        if offers:
            self.call("offer", seconds=seconds)
        self.call("open", system, *arguments, seconds=seconds)
        if offers:
            self.call("end_offer", seconds=seconds)

    def measure(
        self, system: str, repeat: int, bound: float | None, usage: Usage | None = None
    ) -> float:
        """Returns the seconds from the first worker's begin to the last one's end; checks the
        result.

        A worker that takes much longer than `bound` seconds has hung: BenchError names it.
        """
        watchdog = _watchdog_seconds(bound)
        self.call("prepare", system, repeat, seconds=watchdog)
        if usage is not None:
            usage.start()
        start = time.monotonic() + _START_DELAY
        times = self.crew.call("run", system, start, seconds=watchdog)
        if usage is not None:
            usage.stop()
        self.call("check", system, seconds=watchdog)
        return durations([[time] for time in times])[0]

    def measure_many(self, system: str, count: int, bound: float | None) -> list[float]:
        """Returns the seconds of each of `count` runs, as measure() does; `bound` is of one."""
        start = time.monotonic() + _START_DELAY
        seconds = _watchdog_seconds((_MOST_SECONDS + (bound or 0.0)) * count)
        return durations(self.crew.call("run_many", system, start, count, seconds=seconds))

    def server(self, name: str) -> Server:
        """Returns the server process of an aggregator, or of a node's sidecar."""
        servers = [server for of_kind in self._servers.values() for server in of_kind]
        return next(server for server in servers if server.name in (name, f"{name}.sidecar"))

    def usage(self) -> Usage:
        """Returns the usage of all servers and workers."""
        servers = self._servers.items()
        pids = {kind: [server.process.pid for server in of_kind] for kind, of_kind in servers}
        return Usage({**pids, "worker": self.crew.pids})

    def _address(self, name: str) -> str:
        return f"{self.lab.address(name)}:{_PORT}"

    def _start_aggregators(self, stack: contextlib.ExitStack) -> None:
        binary = str(_binaries.find(_binaries.AGGREGATOR))
        for name in self.shards:
            argv = [binary, "--listen", self._address(name)]
            if self.shape.weighted and name != self.shards[-1]:
                argv += ["--weight", str(self.shape.slow_shard)]
            if self._keeps:
                argv += ["--state-dir", _folder(stack)]
            self._start("aggregator", name, name, argv)
        self._await_ready("aggregator")

    def _start_sidecars(self, stack: contextlib.ExitStack) -> None:
        binary = str(_binaries.find(_binaries.SIDECAR))
        for name in self.nodes:
            # Each sidecar has its own folder, which it removes also when this process is killed.
            path = str(Path(_folder(stack)) / "sidecar.sock")
            self.sockets.append(path)
            argv = [binary, "--socket", path, "--own-dir"]
            argv += ["--aggregators", ",".join(map(self._address, self.shards))]
            if self.shape.local:
                argv += ["--shard-listen", self._address(name)]
            self._start("sidecar", f"{name}.sidecar", name, argv)
        self._await_ready("sidecar")

    def _start(self, kind: str, name: str, namespace: str, argv: list[str]) -> None:
        http = ["--http", "127.0.0.1:0"] if self._http else []
        server = Server(
            name,
            [*argv, *http, "--drain-seconds", "1"],
            env=_config.server_environment(log="warn"),
            preexec=self.lab.entering(namespace, die_with_parent(signal.SIGTERM)),
        )
        self._servers[kind].append(server)

    def _await_ready(self, kind: str) -> None:
        for server in self._servers[kind]:
            server.wait_ready(_READY_SECONDS)

    def _stop_servers(self) -> None:
        servers = [server for of_kind in self._servers.values() for server in of_kind]
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.stop(grace=3)


def _folder(stack: contextlib.ExitStack) -> str:
    made = tempfile.TemporaryDirectory(prefix="thalweg-bench-", ignore_cleanup_errors=True)
    return stack.enter_context(made)


def check_installed() -> None:
    """Raises ConfigError when a server program is missing."""
    try:
        for program in (_binaries.AGGREGATOR, _binaries.SIDECAR):
            _binaries.find(program)
    except FileNotFoundError as error:
        raise _config.ConfigError(str(error)) from None


def _watchdog_seconds(bound: float | None) -> float:
    return 20 * (bound or 0.0) + 60


def durations(times: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Returns each run's time, from the first worker's begin to the last one's end."""
    return [
        max(end for _, end in of_all) - min(begin for begin, _ in of_all)
        for of_all in zip(*times, strict=True)
    ]
