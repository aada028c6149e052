"""`thalweg run` starts the aggregators, sidecars and workers of a small cluster on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg import _binaries
from thalweg._job import _addresses
from thalweg._job._processes import Server, ServerError, die_with_parent
from thalweg._settings import _config, _variables
from thalweg._settings._config import ConfigError
from thalweg.cli._supervisor import Supervisor

_LOOPBACK_SECONDS = 5.0
# Servers are started at addresses of this machine, and workers are told of them.
_SET_ASIDE = (
    "THALWEG_AGGREGATORS",
    "THALWEG_HTTP",
    "THALWEG_INTERFACE",
    "THALWEG_LISTEN",
    "THALWEG_SHARD_PORTS",
    "THALWEG_SIDECAR",
)


@dataclass(frozen=True)
class Plan:
    nodes: int
    nproc: int
    shards: int  # aggregators
    local_shards: str | None  # one of _checks.LOCAL_SHARDS; None: left to the environment
    codec: str | None
    timeout: float | None
    port: int
    command: list[str]  # arguments of the Python interpreter
    variables: Mapping[str, str] = field(default_factory=dict)  # for the workers
    log: str = "info"  # least severe level that servers log, unless THALWEG_LOG says it

    @property
    def sidecars_listen(self) -> bool:
        """Whether sidecars can host shards: where it was asked for, or there is nothing else."""
        local_shards = self.local_shards or _config.local_shards_if_set()
        asked = local_shards in ("auto", "1") or self.shards == 0
        return asked and local_shards != "0" and self.nodes > 1


def run(plan: Plan) -> int:
    """Runs the cluster and returns the exit code. Call it on the main thread of a process without
    others.

    Raises Interrupted, after all have ended, and, before it starts anything, ConfigError when there
    is no such script or module, or when there would be no shard.
    """
    check_is_there(plan.command)
    _check_shards(plan)
    timeout = plan.timeout or _config.Config.from_env().timeout
    folders: list[str] = []
    with Supervisor(sys.stdout, sys.stderr) as supervisor:
        try:
            _check_loopback()
            aggregators = _start_aggregators(supervisor, plan, timeout)
            sockets = _start_sidecars(supervisor, plan, aggregators, timeout, folders)
            _start_workers(supervisor, plan, sockets, aggregators)
            code = supervisor.wait()
        except (ServerError, FileNotFoundError) as error:
            supervisor.say(str(error))
            code = 1
        finally:
            supervisor.stop()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
    return code


def check_is_there(command: list[str]) -> None:
    """Raises ConfigError unless Python would find the script, or the package of the module."""
    if command[0] != "-m":
        _check_script(command[0])
        return
    if len(command) == 1:
        raise ConfigError("-m needs the name of a module")
    package = command[1].partition(".")[0]
    sys.path.insert(0, "")  # where `python -m` looks first
    try:
        # __main__ is this program
        found = package not in ("", "__main__") and importlib.util.find_spec(package) is not None
    except ValueError:  # this program has loaded it in a way of its own
        found = True
    finally:
        sys.path.remove("")
    if not found:
        raise ConfigError(f"there is no module {package!r} in {Path.cwd()} or in Python's path")


def _check_script(name: str) -> None:
    script = Path(name).absolute()
    if not name:
        raise ConfigError("the name of the script is empty")
    if not script.exists():
        raise ConfigError(f"there is no script {script}")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise ConfigError(f"{script} is a folder without a __main__.py, expected a script")


def _check_shards(plan: Plan) -> None:
    if plan.local_shards and plan.nodes > 1 and plan.shards == 0 and not plan.sidecars_listen:
        raise ConfigError(
            "--local-shards is 0, and without --shards there is no aggregator: "
            f"{plan.nodes} nodes have nothing that sums for them. Leave --local-shards out, or "
            "give --shards 1"
        )


def _check_loopback() -> None:
    """Raises ServerError unless processes of this machine reach each other."""
    host = _addresses.LOOPBACK
    try:
        with (
            socket.create_server((host, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_SECONDS),
        ):
            pass
    except OSError as error:
        raise ServerError(
            f"{host} cannot be used, at which the processes reach each other: {error}. Is the "
            "loopback interface up? `ip link set lo up` sets it up"
        ) from error


def _start_aggregators(supervisor: Supervisor, plan: Plan, timeout: float) -> list[str]:
    argv = [str(_binaries.find(_binaries.AGGREGATOR))]
    argv += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    names = [f"aggregator{shard}" for shard in range(plan.shards)]
    servers = [_start_server(supervisor, name, argv, plan.log) for name in names]
    _await_all(supervisor, servers, timeout)
    return [server.address for server in servers]


def _start_sidecars(
    supervisor: Supervisor, plan: Plan, aggregators: list[str], timeout: float, folders: list[str]
) -> list[str]:
    binary = str(_binaries.find(_binaries.SIDECAR))
    servers, sockets = [], []
    for node in range(plan.nodes):
        # Each sidecar has its own folder, which it removes also when the launcher is killed.
        folders.append(tempfile.mkdtemp(prefix="thalweg-"))
        sockets.append(str(Path(folders[-1]) / "sidecar.sock"))
        argv = [binary, "--socket", sockets[-1], "--own-dir", "--respawn"]
        argv += ["--http", "127.0.0.1:0"]
        argv += ["--aggregators", ",".join(aggregators)]
        if plan.sidecars_listen:
            argv += ["--shard-listen", "127.0.0.1:0"]
        servers.append(_start_server(supervisor, f"node{node}.sidecar", argv, plan.log))
    _await_all(supervisor, servers, timeout)
    return sockets


def _start_server(supervisor: Supervisor, name: str, argv: list[str], log: str) -> Server:
    with supervisor.pipes(name) as (stdout, stderr):
        server = Server(
            name,
            argv,
            env=_config.server_environment(log=log),
            stdout=stdout,
            stderr=stderr,
            preexec=die_with_parent(signal.SIGTERM),
        )
    supervisor.watch(name, server.process, is_worker=False)
    return server


def _await_all(supervisor: Supervisor, servers: list[Server], timeout: float) -> None:
    scheme = "https" if _config.SecurityFiles.from_env().tls_cert else "http"
    for server in servers:
        with supervisor.interruptible():
            server.wait_ready(timeout)
        supervisor.say(f"{server.name} serves at {server.address}, {scheme}://{server.http}")


def _start_workers(
    supervisor: Supervisor, plan: Plan, sockets: list[str], aggregators: list[str]
) -> None:
    for exported in _variables.assignments(_SET_ASIDE):
        supervisor.say(f"{exported} is set aside: the workers use what is started here")
    port = plan.port or _addresses.free_port()
    for rank in range(plan.nodes * plan.nproc):
        node = rank // plan.nproc
        supervisor.start_worker(
            f"node{node}.worker{rank}",
            [sys.executable, *plan.command],
            env=_worker_environment(plan, rank, sockets[node], port, aggregators),
            to_terminal=rank == 0,
        )


def _worker_environment(
    plan: Plan, rank: int, sidecar: str, port: int, aggregators: Sequence[str]
) -> dict[str, str]:
    node, local_rank = divmod(rank, plan.nproc)
    world_size = plan.nodes * plan.nproc
    env = {"PYTHONUNBUFFERED": "1", **os.environ, **_variables.absolute_folders()}
    if world_size > 1:  # torchrun does the same, because the workers share the cores
        env.setdefault("OMP_NUM_THREADS", "1")
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.nproc),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "THALWEG_SIDECAR": sidecar,
        "THALWEG_AGGREGATORS": ",".join(aggregators),  # a list of the worker wins
    }
    env |= plan.variables
    if plan.codec is not None:
        env["THALWEG_CODEC"] = plan.codec
        if _variables.is_off(env):  # an argument wins over variables
            env["THALWEG_ENABLE"] = "1"
    if plan.local_shards is not None:
        env["THALWEG_LOCAL_SHARDS"] = plan.local_shards
    if plan.timeout is not None:
        env["THALWEG_TIMEOUT"] = f"{plan.timeout:g}"
    return env
