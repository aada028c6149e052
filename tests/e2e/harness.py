"""Runs a small cluster of real programs for tests: servers, and workers that run a job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
from leftovers import await_clean, shared_memory
from ports import free_port
from waiting import until

from thalweg import _binaries
from thalweg._job._processes import Server

JOBS = Path(__file__).parent / "jobs.py"
TIMEOUT = 30.0  # THALWEG_TIMEOUT and THALWEG_STEP_TIMEOUT of the jobs
# A failing worker must have ended by then: its timeout, and the time torch needs to load and exit.
DEADLINE = 90.0


@dataclass
class Servers:
    """Aggregators and sidecars. Their sockets are below `folder`; only they get `env`."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    aggregators: list[Server] = field(default_factory=list)
    sidecars: list[Server] = field(default_factory=list)

    def add_aggregator(self, *flags: str, listen: str = "127.0.0.1:0") -> Server:
        argv = [str(_binaries.find(_binaries.AGGREGATOR)), "--listen", listen]
        server = self._start("aggregator", [*argv, "--http", "127.0.0.1:0", *flags])
        self.aggregators.append(server)
        return server

    def add_sidecar(
        self, *flags: str, aggregators: str | None = None, env: Mapping[str, str] | None = None
    ) -> Server:
        """Adds a sidecar. `aggregators`: default is those that were added; "" means embedded.

        `env` is for this sidecar alone.
        """
        if aggregators is None:
            aggregators = ",".join(server.address for server in self.aggregators)
        path = str(self.folder / f"s{len(self.sidecars)}.sock")
        argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", path, "--http", "127.0.0.1:0"]
        server = self._start("sidecar", [*argv, "--aggregators", aggregators, *flags], env)
        self.sidecars.append(server)
        return server

    def _start(self, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> Server:
        variables = environment(self.folder) | dict(self.env) | dict(env or {})
        server = Server(name, argv, env=variables)
        server.wait_ready(TIMEOUT)
        return server

    def page(self, server: Server, path: str = "/metrics") -> str:
        """Returns an HTTP or HTTPS page of a server, with the token."""
        tls = None
        if ca := self.env.get("THALWEG_TLS_CA"):
            tls = ssl.create_default_context(cafile=ca)
        request = urllib.request.Request(f"http{'s' * bool(tls)}://{server.http}{path}")
        if token := self.env.get("THALWEG_HTTP_TOKEN_FILE"):
            bearer = Path(token).read_text(encoding="ascii").strip()
            request.add_header("Authorization", f"Bearer {bearer}")
        with urllib.request.urlopen(request, timeout=10, context=tls) as reply:
            return str(reply.read().decode())

    def rounds(self) -> int:
        """Returns the rounds that aggregators have completed of the jobs that they have."""
        pages = [json.loads(self.page(each, "/api/v1/jobs")) for each in self.aggregators]
        return sum(job["rounds"] for page in pages for job in page["jobs"])

    def kill_aggregator(self, number: int) -> str:
        """Returns the address at which another one may take its place."""
        aggregator = self.aggregators.pop(number)
        aggregator.process.kill()
        aggregator.process.wait()
        return aggregator.address

    def stop(self) -> None:
        for server in [*self.sidecars, *self.aggregators]:
            server.stop(grace=20)


@contextlib.contextmanager
def servers(
    nodes: int = 0, shards: int = 0, env: Mapping[str, str] | None = None
) -> Iterator[Servers]:
    """Starts servers; afterwards checks that no process and no file of them is left."""
    # pytest's folder is not used: its paths are too long for Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="e2e-"))
    cluster = Servers(folder, env or {})
    shm = shared_memory()
    try:
        for _ in range(shards):
            cluster.add_aggregator()
        for _ in range(nodes):
            cluster.add_sidecar()
        yield cluster
        cluster.stop()
        await_clean(folder, shm)
    finally:
        cluster.stop()
        shutil.rmtree(folder)


def environment(folder: Path) -> dict[str, str]:
    """Returns this process's variables but for Thalweg's; a limit on the CPU is passed on."""
    ours = ("THALWEG_", "AIAK_")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) or name == "THALWEG_CPU_CAPABILITY"
    }
    timeouts = dict.fromkeys(("THALWEG_TIMEOUT", "THALWEG_STEP_TIMEOUT"), str(TIMEOUT))
    return env | timeouts | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes] | preloaded.Process
    out: Path
    log: Path

    @property
    def code(self) -> int:
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def result(self) -> Any:
        return json.loads(self.out.read_text(encoding="utf-8"))


def _load(argv: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *argv],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def fork(argv: list[str], variables: dict[str, str], log: Path) -> preloaded.Process:
    base = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    ours = [name for name in base if name.startswith(("THALWEG_", "AIAK_"))]
    for name in ours:
        del base[name]
    return preloaded.start(argv, variables, log, base | {"OMP_NUM_THREADS": "1"})


class Job:
    """`world` processes that run one function of jobs.py each."""

    def __init__(
        self,
        name: str,
        cluster: Servers,
        tmp_path: Path,
        *,
        sidecar_of: list[str],
        env: Mapping[str, str] | None = None,
        env_of: Sequence[Mapping[str, str]] = (),
        jobs: Path = JOBS,
        afresh: bool = False,
    ) -> None:
        """Starts the job. `sidecar_of`: the socket of each worker's sidecar; "" leaves it to the
        worker.

        `jobs` is the script that has the function. `env` is for all workers, and `env_of` has
        further variables for each. The workers have torch loaded already when they start, unless
        `afresh`, for tests of what happens at `import torch`, or a variable demands it.
        """
        port = free_port()
        self._cluster = cluster
        self.workers = []
        for rank, sidecar in enumerate(sidecar_of):
            out, log = tmp_path / f"{name}{rank}.json", tmp_path / f"{name}{rank}.log"
            variables = environment(cluster.folder) | dict(env or {})
            variables |= dict(env_of[rank]) if env_of else {}
            own = {*(env or {}), *(env_of[rank] if env_of else {})}
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(sidecar_of)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "THALWEG_SIDECAR": sidecar,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),  # otherwise torch makes one in TMPDIR
            }
            start = _load if afresh or preloaded.must_load(own) else fork
            process = start([str(jobs), name, str(out)], variables, log)
            self.workers.append(Worker(rank, process, out, log))

    def wait(self, seconds: float = DEADLINE) -> list[Worker]:
        """Returns all workers when they have ended; at the deadline kills the rest, and fails."""
        deadline = time.monotonic() + seconds
        late = []
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
                late.append(worker.rank)
        assert not late, f"workers {late} did not end within {seconds:g} s\n{self.output}"
        return self.workers

    def results(self, seconds: float = DEADLINE) -> list[Any]:
        """Returns what the workers' functions returned; all must have succeeded."""
        for worker in self.wait(seconds):
            assert worker.code == 0, f"worker {worker.rank} ended with {worker.code}\n{self.output}"
        return [worker.result for worker in self.workers]

    def has_ended(self) -> bool:
        """Returns whether its first worker has."""
        return self.workers[0].process.poll() is not None

    def until(
        self, what: str, ask: Callable[[], Any], seconds: float = DEADLINE, *, every: float = 0.005
    ) -> None:
        """Asks until the answer is true; fails at the deadline, and when the job ends before."""

        def asked() -> Any:
            answer = ask()
            assert answer or not self.has_ended(), f"ended before: {what}\n{self.output}"
            return answer

        until(what, asked, seconds, lambda: self.output, every=every)

    def await_rounds(self, count: int) -> None:
        """Waits until the aggregators have completed `count` more rounds."""
        last = self._cluster.rounds() + count
        self.until(f"{count} more rounds", lambda: self._cluster.rounds() >= last)

    @property
    def output(self) -> str:
        return "".join(f"--- worker {worker.rank}\n{worker.output}" for worker in self.workers)


def metric(server: Server, name: str, label: str = "") -> float:
    """Returns a metric summed over its labels, or only those with `label`, such as
    'codec="fp16"'.
    """
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=10) as reply:
        return metric_in(reply.read().decode(), name, label)


def metric_in(page: str, name: str, label: str = "") -> float:
    """Returns the same sum of a page that was read from /metrics."""
    lines = page.splitlines()
    samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    samples = [line for line in samples if label in line]
    values = [float(line.rpartition(" ")[2]) for line in samples]
    assert values, f"no metric {name} {label}"
    return sum(values)
