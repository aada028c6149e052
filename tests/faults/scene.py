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
from harness import Servers, environment, servers
from stranger import Stranger

from thalweg import _binaries
from thalweg._processes import Server

# The shard of these tests needs about 25 MB at rest and with the healthy job.
BUDGET_MB = 200
THREADS = 64
STALL = 1.0
START = 60.0  # for torch to load and the healthy job to begin
# The healthy job ends with the round it is in, and another one is tried.
END = bystander.TIMEOUT + 2 * bystander.PATIENCE + 10


@dataclass
class Scene:
    server: Server  # the program that is attacked
    address: str  # of its shard
    log: Path
    job: subprocess.Popen[str]

    def stranger(self) -> Stranger:
        return Stranger(self.address)

    def page(self, path: str, timeout: float = 30) -> bytes:
        """Returns what the server answers to GET."""
        with urllib.request.urlopen(f"http://{self.server.http}{path}", timeout=timeout) as reply:
            return bytes(reply.read())

    def outcome(self) -> dict[str, Any]:
        """Ends the healthy job; returns what bystander.py has seen."""
        out, _ = self.job.communicate(timeout=END)
        seen = json.loads(out)
        print(json.dumps(seen | {"alive": self.server.process.poll() is None}))
        return seen

    def assert_unharmed(self) -> None:
        """Ends the healthy job, and checks what each attack must leave as it is."""
        seen = self.outcome()
        code = self.server.process.poll()
        harm = {
            "the server has ended": code is not None and code,
            "the healthy job has failed": seen["error"],
            "longest stall, s": seen["stall"] > STALL and seen["stall"],
            "memory, MB": seen["memory_mb"] > BUDGET_MB and seen["memory_mb"],
            "threads": seen["threads"] > THREADS and seen["threads"],
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
def scene(tmp_path: Path, *flags: str, hosted: bool = False) -> Iterator[Scene]:
    """Starts a healthy job of two nodes, with an aggregator (which gets `flags`) as its only shard,
    or with shards in its sidecars.
    """
    log = tmp_path / "log"
    with servers() as cluster:
        if hosted:
            extra, listen = "", ["--shard-listen", "127.0.0.1:0"]
        else:
            extra, listen = start_aggregator(cluster, log, *flags).address, []
        sidecars = [cluster.add_sidecar(*listen, aggregators="") for _ in range(2)]
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
            yield Scene(attacked, address, log, job)
        finally:
            job.kill()
            job.communicate()
            if not hosted:
                attacked.process.kill()  # it may wait for what the attack has left
