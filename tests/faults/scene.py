"""A server that is attacked beside a healthy job, and what both must stand."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bystander
from harness import Servers, environment, metric, servers
from stranger import Stranger
from waiting import settled

from thalweg import _binaries
from thalweg._job._processes import Server

LIMIT_MB = 128  # --memory-limit of the shard that is attacked
# What a process needs beside its limit: 25 MB at rest, the healthy job, a message that is being
# parsed, and what malloc keeps.
BASE_MB = 96
THREADS = 64
STALL = 1.0
# gRPC keeps some threads for the next calls.
SPARE_THREADS = 8
# Connections of strangers are closed by then.
RETURN = 10.0
# The healthy job ends with the round it is in, and another one is tried.
END = bystander.TIMEOUT + bystander.PATIENCE + 2 * bystander.ATTEMPT + 10

# What each attack has done, printed when all have ended.
TABLE = [
    "| attack | before | memory | threads | stall | new job after |",
    "|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        folder = Path("/proc", str(pid))
        return cls(len(list(folder.glob("fd/*"))), len(list(folder.glob("task/*"))))


@dataclass
class Scene:
    attack: str
    before: str
    server: Server  # the program that is attacked
    address: str  # of its shard
    log: Path
    job: subprocess.Popen[str]
    at_rest: Held

    def stranger(self) -> Stranger:
        return Stranger(self.address)

    def page(self, path: str, timeout: float = 30) -> bytes:
        """Returns what the server answers to GET."""
        with urllib.request.urlopen(f"http://{self.server.http}{path}", timeout=timeout) as reply:
            return bytes(reply.read())

    def jobs(self, at_most: int) -> float:
        """Returns the shard's number of jobs once it is within the limit, or at the deadline."""
        return settled(
            lambda: metric(self.server, "thalweg_shard_jobs"),
            lambda jobs: jobs <= at_most,
            bystander.PATIENCE,
            every=0.05,
        )

    def left(self) -> str:
        """Returns what the server still has of the attack when strangers have long gone."""

        def left() -> str:
            if self.server.process.poll() is not None:
                return ""
            held = Held.by(self.server.process.pid)
            threads = held.threads - self.at_rest.threads
            descriptors = held.descriptors - self.at_rest.descriptors
            if threads <= SPARE_THREADS and descriptors <= 0:
                return ""
            return f"{descriptors} descriptors, {threads} threads"

        return settled(left, lambda still: not still, RETURN, every=0.05)

    def outcome(self) -> dict[str, Any]:
        """Ends the healthy job; returns what bystander.py has seen."""
        out, _ = self.job.communicate(timeout=END)
        seen: dict[str, Any] = json.loads(out)
        new = "no" if seen["new_job"] is None else f"{seen['new_job']:.1f} s"
        numbers = f"{seen['memory_mb']:.0f} MB | {seen['threads']} | {seen['stall'] * 1e3:.0f} ms"
        TABLE.append(f"| {self.attack} | {self.before} | {numbers} | {new} |")
        return seen

    def assert_unharmed(self) -> None:
        """Ends the healthy job, and checks what each attack must leave as it is."""
        left = self.left()
        seen = self.outcome()
        code = self.server.process.poll()
        memory = seen["memory_mb"]
        harm = {
            "the server has ended": code is not None and code,
            "the healthy job has failed": seen["error"],
            "longest stall, s": seen["stall"] > STALL and seen["stall"],
            "memory, MB": memory > (LIMIT_MB << 20) / 1e6 + BASE_MB and memory,
            "threads": seen["threads"] > THREADS and seen["threads"],
            "left behind": left,
            "a new job is not accepted": seen["new_job"] is None,
        }
        assert not any(harm.values()), {what: much for what, much in harm.items() if much}
        assert seen["rounds"] > 0


def start_aggregator(cluster: Servers, log: Path, *flags: str) -> Server:
    """Adds an aggregator that writes its log to a file."""
    argv = [str(_binaries.find(_binaries.AGGREGATOR)), "--listen", "127.0.0.1:0"]
    argv += ["--http", "127.0.0.1:0", *flags]
    with log.open("wb") as file:
        server = Server("aggregator", argv, env=environment(cluster.folder), stderr=file)
    cluster.aggregators.append(server)
    server.wait_ready(20)
    return server


@contextlib.contextmanager
def scene(
    tmp_path: Path, attack: str, *, before: str = "", hosted: bool = False
) -> Iterator[Scene]:
    """Starts a healthy job of two nodes, with an aggregator as its only shard, or with shards in
    its sidecars. `attack` names what will be done, and `before` what it once did.
    """
    log = tmp_path / "log"
    flags = ["--memory-limit", f"{LIMIT_MB}M"]
    with servers() as cluster:
        if hosted:
            extra, flags = "", [*flags, "--shard-listen", "127.0.0.1:0"]
            attack += ", at a sidecar"
        else:
            extra, flags = start_aggregator(cluster, log, *flags).address, []
        sidecars = [cluster.add_sidecar(*flags, aggregators="") for _ in range(2)]
        attacked = sidecars[0] if hosted else cluster.aggregators[0]
        argv = [sys.executable, bystander.__file__, str(attacked.process.pid), extra]
        job = subprocess.Popen(
            [*argv, *(sidecar.address for sidecar in sidecars)],
            env=environment(cluster.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert job.stdout is not None
            address = job.stdout.readline().strip()
            assert address, "the healthy job has not begun; its message is above"
            at_rest = Held.by(attacked.process.pid)
            yield Scene(attack, before, attacked, address, log, job, at_rest)
        finally:
            job.kill()
            job.communicate()
            if not hosted:
                attacked.process.kill()  # it may wait for what the attack has left
