"""The nodes that elastic_chaos.py disturbs, each with somebody who starts again what dies there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import elastic_worker
from waiting import settled

from thalweg import _binaries
from thalweg._job._processes import Server, die_with_parent
from thalweg_bench.lab import INTERFACE, Lab

PORT = 29555
SHARD = "shard"
_READY = 20.0
RECONNECT = "3"  # as workers of an elastic training that start their sidecars give it to them


@contextlib.contextmanager
def serving(lab: Lab, folder: Path) -> Iterator[str]:
    """Runs an aggregator in the host SHARD; gives its address."""
    address = f"{lab.address(SHARD)}:7070"
    with (folder / f"{SHARD}.txt").open("ab") as log:
        server = Server(
            SHARD,
            [str(_binaries.find(_binaries.AGGREGATOR)), "--listen", address],
            env=os.environ | {"THALWEG_LOG": "warn"},
            stderr=log,
            preexec=lab.entering(SHARD, die_with_parent(signal.SIGKILL)),
        )
    server.wait_ready(_READY)
    try:
        yield address
    finally:
        server.process.kill()
        server.process.wait()


class Node:
    """A worker, and a sidecar that hosts a shard, in a host of the laboratory.

    Use it in a process without other threads: workers are forked. Call look() often.
    """

    def __init__(
        self,
        lab: Lab,
        number: int,
        folder: Path,
        *,
        nodes: Sequence[str],
        codec: str,
        every: int,
        aggregator: str = "",
    ) -> None:
        """The training of `nodes`, which are hosts, has that codec, and local updates after `every`
        steps unless 0; by quorum if there is an aggregator, instead of a shard in each sidecar.
        """
        self.host = lab.names[number]
        self.number = number
        self.is_down = False  # nothing is started again
        self.is_cut = False
        self._lab, self._folder = lab, folder
        self._codec, self._every = codec, every
        self._nodes, self._aggregator = nodes, aggregator
        self._worker = 0
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    @property
    def log(self) -> Path:
        return self._folder / f"{self.host}.json"

    @property
    def is_living(self) -> bool:
        return not (self.is_down or self.is_cut or self._is_stopped)

    @property
    def has_ended(self) -> bool:
        """Returns whether the worker does not run."""
        return self._worker == 0

    def look(self) -> None:
        """Starts again what has died, unless the node is down."""
        self._reap()
        if self.is_down:
            return
        if self._sidecar is None:
            self._start_sidecar()
        if self._worker == 0:
            self._fork_worker()

    def kill_worker(self) -> None:
        self._reap()
        if self._worker:
            os.kill(self._worker, signal.SIGKILL)
            os.waitpid(self._worker, 0)
            self._worker = 0

    def kill_sidecar(self) -> None:
        if self._sidecar is not None:
            self._sidecar.kill()
            self._sidecar.wait()
            self._sidecar = None

    def go_down(self) -> None:
        """Kills all, which stays so until come_up()."""
        self.is_down = True
        self.kill_sidecar()
        self.kill_worker()

    def come_up(self) -> None:
        self.is_down = False

    def stop(self) -> None:
        self._is_stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._is_stopped = False
        self._signal(signal.SIGCONT)

    def wait(self, seconds: float) -> bool:
        """Waits for the worker's end; returns whether it has ended well."""
        pid, status = settled(
            lambda: os.waitpid(self._worker, os.WNOHANG), lambda found: found[0] > 0, seconds
        )
        if not pid:
            return False
        self._worker = 0
        return status == 0

    def output(self) -> str:
        return (self._folder / f"{self.host}.txt").read_text(encoding="utf-8", errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        self._reap()
        for pid in (self._worker, 0 if self._sidecar is None else self._sidecar.pid):
            if pid:
                os.kill(pid, number)

    def _reap(self) -> None:
        if self._sidecar is not None and self._sidecar.poll() is not None:
            self._sidecar = None
        if self._worker and os.waitpid(self._worker, os.WNOHANG)[0]:
            self._worker = 0

    def _start_sidecar(self) -> None:
        argv = [str(_binaries.find(_binaries.SIDECAR)), f"--socket={self._socket}"]
        argv += ["--aggregators", self._aggregator]
        if not self._aggregator:
            argv += [f"--shard-listen={self._lab.address(self.host)}:0"]
        with (self._folder / f"{self.host}.txt").open("ab") as log:
            self._sidecar = subprocess.Popen(
                argv,
                env=os.environ | {"THALWEG_LOG": "warn", "THALWEG_RECONNECT": RECONNECT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=self._lab.entering(self.host, die_with_parent(signal.SIGKILL)),
            )

    def _fork_worker(self) -> None:
        prepare = die_with_parent(signal.SIGKILL)
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self._worker = pid
            return
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            prepare()
            self._train()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)

    def _train(self) -> None:
        log = os.open(self._folder / f"{self.host}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._lab.enter(self.host)
        os.environ.update(
            THALWEG_ELASTIC=",".join(f"{self._lab.address(n)}:{PORT}" for n in self._nodes),
            THALWEG_ELASTIC_NODE=str(self.number),
            THALWEG_SIDECAR=self._socket,
            THALWEG_RECONNECT=RECONNECT,
            THALWEG_CODEC=self._codec,
            GLOO_SOCKET_IFNAME=INTERFACE,
        )
        elastic_worker.train(
            self.log, self._folder / "over", self._every, by_quorum=bool(self._aggregator)
        )

    @property
    def _socket(self) -> str:
        return str(self._folder / f"{self.host}.sock")
