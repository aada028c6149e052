"""Reads settings from the environment. Beside _variables.py, no other Python module does.

The C++ counterpart is core/base/env.cc.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from thalweg._settings._arguments import JobArguments
from thalweg._settings._checks import (
    NODE_REDUCE,
    check_chunk_bytes,
    check_codec,
    check_count,
    check_interval,
    check_local_shards,
    check_patience,
    check_ports,
    check_step_timeout,
    check_timeout,
    parse_addresses,
    parse_served,
)
from thalweg._settings._variables import (
    CODEC_SWITCHES,
    POWERSGD,
    SWITCHES,
    ConfigError,
    absolute_folders,
    assignments,
    check_choice,
    is_off,
    is_on,
    look_up,
    warn_of_unknown,
)

__all__ = [
    "Activation",
    "Config",
    "ConfigError",
    "Elastic",
    "JobArguments",
    "LocalUpdates",
    "Network",
    "SecurityFiles",
    "Served",
    "log_level",
    "parse_addresses",
    "server_environment",
]

_FUSED = "THALWEG_FUSED_OPTIMIZER"
_LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_PS, _PS_MODE, _PS_EVERY = "THALWEG_PS", "THALWEG_PS_MODE", "THALWEG_PS_EVERY"


class Config(NamedTuple):
    """The settings of a worker or the command line; servers read their own variables."""

    aggregators: tuple[str, ...]
    chunk_bytes: int  # 0: chosen from the speed of the links
    codec: str  # in the form of Policy.spec()
    job: str
    local_shards: str  # one of LOCAL_SHARDS
    min_nodes: int  # with which the job goes on when others are lost; 0: all
    node_reduce: str  # one of NODE_REDUCE
    reconnect: float  # seconds in which a connection or a program may come back
    residuals: str  # a folder; empty: none
    sidecar: str
    snapshot_every: int  # steps; 0: no snapshots
    step_timeout: float  # 0: the process group's
    timeout: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        if environ is None:
            warn_of_unknown()

        return cls(
            aggregators=parse_addresses(*look_up("THALWEG_AGGREGATORS", env)),
            chunk_bytes=check_chunk_bytes(*look_up("THALWEG_CHUNK_BYTES", env)),
            codec=_choose_codec(env),
            job=look_up("THALWEG_JOB", env)[1],
            local_shards=check_local_shards(*look_up("THALWEG_LOCAL_SHARDS", env)),
            min_nodes=check_count(*look_up("THALWEG_MIN_NODES", env)),
            node_reduce=check_choice(*look_up("THALWEG_NODE_REDUCE", env), NODE_REDUCE),
            reconnect=check_patience(*look_up("THALWEG_RECONNECT", env)),
            residuals=look_up("THALWEG_RESIDUALS", env)[1],
            sidecar=look_up("THALWEG_SIDECAR", env)[1],
            snapshot_every=check_count(*look_up("THALWEG_SNAPSHOT_EVERY", env)),
            step_timeout=check_step_timeout(*look_up("THALWEG_STEP_TIMEOUT", env)),
            timeout=check_timeout(*look_up("THALWEG_TIMEOUT", env)),
        )

    def override(self, arguments: JobArguments) -> Config:
        """Applies what the caller gives. Raises ConfigError that names the wrong argument."""
        return self._replace(**arguments.checked())


class Network(NamedTuple):
    """How other hosts reach this one. The last three are variables of torch, Gloo and NCCL."""

    interface: str  # a name or an address; empty: the others say it
    shard_ports: str  # a port or FIRST-LAST; 0: any
    master: str
    gloo_interfaces: str
    nccl_interfaces: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Network:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        return cls(
            interface=look_up("THALWEG_INTERFACE", env)[1],
            shard_ports=check_ports(*look_up("THALWEG_SHARD_PORTS", env)),
            master=env.get("MASTER_ADDR", ""),
            gloo_interfaces=env.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interfaces=env.get("NCCL_SOCKET_IFNAME", ""),
        )


class Elastic(NamedTuple):
    """The nodes of a training that may lose some; thalweg/elastic/_nodes.py reads the text."""

    nodes: str  # empty: not set
    node: int | None  # this one's place among them; None: by its address

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Elastic:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        name, node = look_up("THALWEG_ELASTIC_NODE", environ)
        nodes = look_up("THALWEG_ELASTIC", environ)[1]
        return cls(nodes, check_count(name, node) if node else None)


class SecurityFiles(NamedTuple):
    """Paths of files; empty: none. The server programs read the same variables."""

    tls_cert: str
    tls_key: str
    tls_ca: str
    http_token: str

    @classmethod
    def from_env(cls) -> SecurityFiles:
        names = ("TLS_CERT", "TLS_KEY", "TLS_CA", "HTTP_TOKEN_FILE")
        return cls(*(os.environ.get(f"THALWEG_{name}", "") for name in names))


class Activation(NamedTuple):
    """The environment's settings for a script that does not mention Thalweg."""

    codec: str  # in the form of Policy.spec(); empty: DistributedDataParallel is unchanged
    variables: tuple[str, ...]  # NAME=value of all that have an effect
    remarks: tuple[str, ...]  # explanations of their combination, and of those without effect
    fused_optimizer: str  # NAME=value if fused optimizers are requested
    log_level: int  # level of Python's logging
    min_nodes: int  # with which the job goes on when others are lost; 0: all
    timeout: float
    step_timeout: float  # 0: the process group's

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Activation:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        if environ is None:
            warn_of_unknown()
        switches = () if is_off(env) else SWITCHES
        on = [name for name in switches if name != "THALWEG_CODEC" and is_on(name, env)]
        choosing, remarks = _choosing(env, on) if switches else ([], ())
        asking = [name for name in on if name not in (_FUSED, *CODEC_SWITCHES)]
        return cls(
            codec=_choose_codec(env) if asking or choosing else "",
            variables=tuple(assignments([*asking, *choosing, "THALWEG_NODE_REDUCE"], env)),
            remarks=remarks,
            fused_optimizer="".join(assignments([_FUSED] if _FUSED in on else [], env)),
            log_level=log_level(env),
            min_nodes=check_count(*look_up("THALWEG_MIN_NODES", env)),
            timeout=check_timeout(*look_up("THALWEG_TIMEOUT", env)),
            step_timeout=check_step_timeout(*look_up("THALWEG_STEP_TIMEOUT", env)),
        )


class Served(NamedTuple):
    """Which optimizers of scripts that do not mention Thalweg move to the shards."""

    kind: str  # one of PS_KINDS; "auto": what the script's optimizer is; "": none moves
    pull: str | None  # how weights travel; None: as they do by default
    overlap: bool  # they travel during the next forward pass
    variables: tuple[str, ...]  # NAME=value
    averaging: tuple[str, ...]  # NAME=value of those that have no effect where none moves

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Served:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        asked = ("", None, False) if is_off(env) else parse_served(*look_up(_PS, env))
        averaging = [name for name in SWITCHES if name != _FUSED]
        return cls(*asked, tuple(assignments([_PS], env)), tuple(assignments(averaging, env)))


class LocalUpdates(NamedTuple):
    """Whether optimizers of scripts that do not mention Thalweg step on each worker alone."""

    every: int  # steps from one exchange to the next; 0: they do not step alone
    variables: tuple[str, ...]  # NAME=value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LocalUpdates:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        name, mode = look_up(_PS_MODE, env)
        if is_off(env) or check_choice(name, mode or "0", ("0", "local")) == "0":
            return cls(0, ())
        if (served := Served.from_env(env)).kind:
            raise ConfigError(
                f"{name}=local lets workers step alone, and {served.variables[0]} lets shards do "
                "every step: unset one of them"
            )
        if not env.get(_PS_EVERY):
            raise ConfigError(
                f"{name}=local asks for {_PS_EVERY}: set it to a number of steps, such as 50"
            )
        every = check_interval(*look_up(_PS_EVERY, env))
        return cls(every, tuple(assignments([_PS_MODE, _PS_EVERY], env)))


def local_shards_if_set() -> str | None:
    """Returns THALWEG_LOCAL_SHARDS, or None where it is not set. Raises ConfigError."""
    if not assignments(["THALWEG_LOCAL_SHARDS"]):
        return None
    return check_local_shards(*look_up("THALWEG_LOCAL_SHARDS"))


def log_level(environ: Mapping[str, str] | None = None) -> int:
    """Returns the level of Python's logging. Raises ConfigError."""
    return _LOG_LEVELS[check_choice(*look_up("THALWEG_LOG", environ), _LOG_LEVELS)]


def _choosing(env: Mapping[str, str], on: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns which variables choose the codec, and remarks, given the switches that are on."""
    switches = [name for name in CODEC_SWITCHES if name in on]
    if env.get("THALWEG_CODEC"):
        ignored = ", ".join(assignments([*switches, *POWERSGD], env))
        return ["THALWEG_CODEC"], (f"THALWEG_CODEC wins over {ignored}",) if ignored else ()
    if "THALWEG_POWERSGD_COMPRESSION" not in switches:
        ignored = ", ".join(assignments(POWERSGD, env))
        return switches, (f"{ignored} has no effect without PowerSGD",) if ignored else ()
    remark = "FP16 and PowerSGD together are PowerSGD with fp16 factors"
    return [*switches, *POWERSGD], (remark,) if len(switches) == 2 else ()


def _choose_codec(env: Mapping[str, str]) -> str:
    """Returns THALWEG_CODEC if it is set, else what the switches of AIAK-Training ask for."""
    from thalweg import codecs

    fp16 = is_on("THALWEG_FP16_COMPRESSION", env)
    powersgd = is_on("THALWEG_POWERSGD_COMPRESSION", env)
    if env.get("THALWEG_CODEC") or not (fp16 or powersgd):
        return check_codec(*look_up("THALWEG_CODEC", env))
    if not powersgd:
        return codecs.FP16().spec()
    try:
        rank, start = (
            codecs.read_value(codecs.PowerSGD, attribute, *look_up(name, env))
            for attribute, name in (
                ("rank", "THALWEG_MATRIX_APPROXIMATION_RANK"),
                ("start_iter", "THALWEG_START_COMPRESS_ITER"),
            )
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    wire = "fp16" if fp16 else "fp32"
    return codecs.parse(f"powersgd:rank={rank},start={start},wire={wire}").spec()


def server_environment(log: str) -> dict[str, str]:
    """Returns the environment for a server program; `log` is the log level unless THALWEG_LOG is
    set.
    """
    return {"THALWEG_LOG": log, **os.environ, **absolute_folders()}
