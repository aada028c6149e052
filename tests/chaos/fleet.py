"""The processes that chaos.py disturbs, in a laboratory network: each can be lost and replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from chaos_worker import LOCAL, NODES, WORLD, Progress, Worker

from thalweg import _binaries
from thalweg._job._processes import Server, die_with_parent
from thalweg_bench.lab import Lab

PORT = 7070
RECONNECT = 6  # seconds: THALWEG_RECONNECT
_READY = 20.0


@dataclass
class Member:
    """A process. `kind` is worker, sidecar or shard, and `host` its namespace."""

    name: str
    kind: str
    host: str
    pid: int = 0
    stopped: bool = False

    def signal(self, number: signal.Signals) -> None:
        self.stopped = number == signal.SIGSTOP
        os.kill(self.pid, number)


class Fleet:
    """4 nodes with a sidecar and 2 workers each; and 3 shards of their own, or one in each sidecar.

    Use it in a process without other threads: workers are forked. Servers write below `folder`.
    """

    def __init__(self, lab: Lab, folder: Path, *, hosted: bool) -> None:
        self._lab, self._folder, self._hosted = lab, folder, hosted
        shards = [] if hosted else hosts_of_shards()
        homes = hosts_of_nodes() if hosted else shards
        self.shards = [f"{lab.address(host)}:{PORT}" for host in homes]
        self.hosts = list(range(NODES)) if hosted else [-1] * len(shards)
        self.progress = Progress()
        self.pipes: dict[int, Connection] = {}  # by rank
        self._servers: dict[str, Server] = {}
        self.members = [Member(host, "shard", host) for host in shards]
        self.members += [Member(f"{host}.sidecar", "sidecar", host) for host in hosts_of_nodes()]
        self.members += [
            Member(f"rank{rank}", "worker", f"node{rank // LOCAL}") for rank in range(WORLD)
        ]

    def replace_lost(self) -> None:
        """Starts every process that does not run."""
        lost = [member for member in self.members if not self.is_running(member)]
        for member in lost:
            if member.kind == "worker":
                self._fork(member)
            else:
                self._start(member)
        for member in lost:
            if member.kind != "worker":
                self._servers[member.name].wait_ready(_READY)

    def lose(self, member: Member) -> None:
        """Kills a process. Returns when it has gone."""
        if self.is_running(member):
            os.kill(member.pid, signal.SIGKILL)
            os.waitpid(member.pid, 0)
            member.pid, member.stopped = 0, False

    def restart(self, server: Member) -> None:
        """Starts a server that has been lost; at the same address."""
        self._start(server)
        self._servers[server.name].wait_ready(_READY)

    def is_running(self, member: Member) -> bool:
        if member.pid == 0:
            return False
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(member.pid, os.WNOHANG)[0] == 0:
                return True
        member.pid, member.stopped = 0, False
        return False

    def kill(self) -> None:
        """Kills all processes. May be called again."""
        for member in self.members:
            self.lose(member)

    def log(self) -> str:
        """Returns the ends of the servers' logs."""
        texts = [path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.log"))]
        return "\n".join(text[-2000:] for text in texts)

    def _socket(self, host: str) -> str:
        return str(self._folder / f"{host}.sock")

    def _start(self, member: Member) -> None:
        listen = f"{self._lab.address(member.host)}:{PORT}"
        if member.kind == "shard":
            argv = [str(_binaries.find(_binaries.AGGREGATOR)), "--listen", listen]
        else:
            argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", self._socket(member.host)]
            argv += ["--aggregators", ""]
            argv += ["--shard-listen", listen] if self._hosted else []
        env = os.environ | {"THALWEG_LOG": "warn", "THALWEG_RECONNECT": str(RECONNECT)}
        with (self._folder / f"{member.name}.log").open("ab") as log:
            server = Server(
                member.name,
                [*argv, "--drain-seconds", "1"],
                env=env,
                stderr=log,
                preexec=self._lab.entering(member.host, die_with_parent(signal.SIGKILL)),
            )
        self._servers[member.name] = server
        member.pid = server.process.pid

    def _fork(self, member: Member) -> None:
        rank = int(member.name.removeprefix("rank"))
        old = self.pipes.pop(rank, None)
        if old is not None:
            old.close()
        prepare = die_with_parent(signal.SIGKILL)
        ours, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(EOFError, OSError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                prepare()
                for other in (ours, *self.pipes.values()):
                    other.close()
                self._lab.enter(member.host)
                Worker(rank, self._socket(member.host), self.progress, theirs).serve()
            os._exit(0)
        theirs.close()
        self.pipes[rank], member.pid = ours, pid


def hosts_of_nodes() -> list[str]:
    return [f"node{node}" for node in range(NODES)]


def hosts_of_shards() -> list[str]:
    return [f"shard{shard}" for shard in range(3)]
