"""Starts the sidecars that a job lacks."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from thalweg import _binaries
from thalweg._job import (
    _addresses,
    _collectives,
    _failing,
    _processes,
    _rendezvous,
    _topology,
)
from thalweg._job._topology import Introduction
from thalweg._settings import _config
from thalweg._settings._config import Network

_log = logging.getLogger("thalweg")

_SUN_PATH_MAX = 107
# Sidecars that this process has started, until they end.
_started: list[_processes.Server] = []


def find_sidecars(
    workers: Sequence[Introduction], rank: int, network: Network, meeting: _collectives.Meeting
) -> list[str]:
    """Returns the socket of every worker's sidecar, by rank, after starting those that are missing.

    All workers call it together.
    """
    paths = [worker.sidecar or worker.running for worker in workers]
    starters = _topology.starters(workers)
    if starters:
        starts, listen = rank in starters, ""
        if _topology.may_host(workers):
            address = _find_address(workers, rank, network, meeting)
            listen = _addresses.join(address, network.shard_ports)
        started = _collectives.gather_made(
            lambda: _start(workers[rank], listen) if starts else "", meeting
        )
        for starter, members in starters.items():
            for member in members:
                paths[member] = started[starter]
    return paths


def _find_address(
    workers: Sequence[Introduction], rank: int, network: Network, meeting: _collectives.Meeting
) -> str:
    """Returns the address at which a sidecar of this worker's listens for the other nodes.

    All workers call it together. Raises ConfigError.
    """
    hosts = [worker.host for worker in workers]
    if len(set(hosts)) == 1:
        return _addresses.LOOPBACK
    starters = _topology.starters(workers)
    starts = rank in starters
    candidates = _collectives.gather_made(
        lambda: _candidate(network, meeting) if starts else "", meeting
    )
    addresses = _collectives.gather(_addresses.settle(hosts, candidates, rank), meeting)
    for starter in starters:
        _addresses.check_published(_topology.host_name(hosts[starter]), addresses[starter])
    return addresses[rank]


def _candidate(network: Network, meeting: _collectives.Meeting) -> str:
    store_host = ""
    with contextlib.suppress(RuntimeError):  # MPI's groups have no store
        store_host = _rendezvous.host_of(meeting.shared or _rendezvous.default_store())
    try:
        return _addresses.candidate(network, store_host).address
    except _config.ConfigError as error:
        raise _config.ConfigError(f"thalweg: {error}") from None


def _start(worker: Introduction, listen: str) -> str:
    """Returns the socket of a new sidecar. Raises RuntimeError."""
    try:
        return _start_in(tempfile.mkdtemp(prefix="thalweg-"), worker, listen)
    except (_config.ConfigError, _processes.ServerError, OSError) as failure:
        host = _topology.host_name(worker.host)
        raise RuntimeError(f"thalweg: {host}: {failure}") from failure


def _start_in(folder: str, worker: Introduction, listen: str) -> str:
    """Starts it with its socket in `folder`. With `listen`, HOST:PORTS, it can host a shard."""
    try:
        path = str(Path(folder) / "sidecar.sock")
        if len(os.fsencode(path)) > _SUN_PATH_MAX:
            raise _config.ConfigError(
                f"{path} is longer than the {_SUN_PATH_MAX} bytes of a Unix socket's path: "
                "set TMPDIR to a shorter one"
            )
        argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", path, "--own-dir"]
        argv += ["--respawn", "--exit-when-idle", "--timeout", f"{worker.timeout:g}"]
        if worker.aggregators:
            argv += ["--aggregators", ",".join(worker.aggregators)]
        if listen:
            argv += ["--shard-listen", listen]
        server = _processes.Server(
            _binaries.SIDECAR, argv, env=_config.server_environment(log="warn")
        )
        server.wait_ready(worker.timeout)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _started[:] = [*(other for other in _started if other.process.poll() is None), server]
    if listen:
        _failing.note_failures()
        # Finalizers run in reverse order at exit: the sessions with the sidecar are closed by then.
        weakref.finalize(server, _await_end, server.process, worker.timeout)
    else:
        weakref.finalize(server, _let_run, server.process)
    return path


def _let_run(sidecar: subprocess.Popen[bytes]) -> None:
    """Lets subprocess not warn, at exit, of a process that ends with its last worker."""
    if sidecar.returncode is None:
        sidecar.returncode = 0


def _await_end(sidecar: subprocess.Popen[bytes], timeout: float) -> None:
    """Waits until the other nodes have left the shard of a sidecar, which then ends.

    A container ends with its first process, and takes the sidecar along. A process that fails
    does not wait, so that its launcher hears of it.
    """
    if _failing.is_failing():
        return
    try:
        sidecar.wait(timeout)
    except subprocess.TimeoutExpired:
        _log.warning(
            "other nodes have not left the shard of this node's sidecar (process %d) within %g s: "
            "their job fails if the sidecar ends before they do",
            sidecar.pid,
            timeout,
        )
