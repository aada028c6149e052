"""Reads settings from the environment. Beside _variables.py, no other Python module does.

The C++ counterpart is core/base/env.cc.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg._settings._variables import (
    CODEC_SWITCHES,
    POWERSGD,
    SWITCHES,
    ConfigError,
    assignments,
    check_choice,
    is_on,
    look_up,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from thalweg.codecs import Codec
    from thalweg.policy import Policy

__all__ = [
    "Activation",
    "Config",
    "ConfigError",
    "Network",
    "SecurityFiles",
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
LOCAL_SHARDS = ("auto", "0", "1")
NODE_REDUCE = ("sidecar", "workers")
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20
MAX_TIMEOUT = 86400


class Config(NamedTuple):
    """The settings of a worker or the command line; servers read their own variables."""

    aggregators: tuple[str, ...]
    chunk_bytes: int  # 0: chosen from the speed of the links
    codec: str  # in the form of Policy.spec()
    job: str
    local_shards: str  # one of LOCAL_SHARDS
    min_nodes: int  # with which the job goes on when others are lost; 0: all
    node_reduce: str  # one of NODE_REDUCE
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
            aggregators=parse_addresses(*look_up(env, "THALWEG_AGGREGATORS")),
            chunk_bytes=_check_chunk_bytes(*look_up(env, "THALWEG_CHUNK_BYTES")),
            codec=_choose_codec(env),
            job=look_up(env, "THALWEG_JOB")[1],
            local_shards=_check_local_shards(*look_up(env, "THALWEG_LOCAL_SHARDS")),
            min_nodes=_check_count(*look_up(env, "THALWEG_MIN_NODES")),
            node_reduce=check_choice(*look_up(env, "THALWEG_NODE_REDUCE"), NODE_REDUCE),
            residuals=look_up(env, "THALWEG_RESIDUALS")[1],
            sidecar=look_up(env, "THALWEG_SIDECAR")[1],
            snapshot_every=_check_count(*look_up(env, "THALWEG_SNAPSHOT_EVERY")),
            step_timeout=_check_step_timeout(*look_up(env, "THALWEG_STEP_TIMEOUT")),
            timeout=_check_timeout(*look_up(env, "THALWEG_TIMEOUT")),
        )

    def override(self, **arguments: Any) -> Config:  # noqa: ANN401 - each is checked
        """Applies the caller's arguments, which win over the environment unless they are None."""
        checks: dict[str, Callable[[str, Any], Any]] = {
            "chunk_bytes": _check_chunk_bytes,
            "codec": _check_codec,
            "local_shards": _check_local_shards,
            "min_nodes": _check_count,
            "node_reduce": functools.partial(check_choice, choices=NODE_REDUCE),
            "residuals": lambda _, value: os.fspath(value),
            "snapshot_every": _check_count,
            "step_timeout": _check_step_timeout,
            "timeout": _check_timeout,
        }
        given = {n: checks[n](n, value) for n, value in arguments.items() if value is not None}
        return self._replace(**given)


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
            interface=look_up(env, "THALWEG_INTERFACE")[1],
            shard_ports=_check_ports(*look_up(env, "THALWEG_SHARD_PORTS")),
            master=env.get("MASTER_ADDR", ""),
            gloo_interfaces=env.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interfaces=env.get("NCCL_SOCKET_IFNAME", ""),
        )


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
    timeout: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Activation:
        """Reads the environment. Raises ConfigError that names the wrong variable."""
        env = os.environ if environ is None else environ
        if environ is None:
            warn_of_unknown()
        switches = () if env.get("THALWEG_ENABLE") == "0" else SWITCHES
        on = [name for name in switches if name != "THALWEG_CODEC" and is_on(env, name)]
        choosing, remarks = _choosing(env, on) if switches else ([], ())
        asking = [name for name in on if name not in (_FUSED, *CODEC_SWITCHES)]
        return cls(
            codec=_choose_codec(env) if asking or choosing else "",
            variables=tuple(assignments(env, [*asking, *choosing, "THALWEG_NODE_REDUCE"])),
            remarks=remarks,
            fused_optimizer="".join(assignments(env, [_FUSED] if _FUSED in on else [])),
            log_level=log_level(env),
            timeout=_check_timeout(*look_up(env, "THALWEG_TIMEOUT")),
        )


def log_level(environ: Mapping[str, str] | None = None) -> int:
    """Returns the level of Python's logging. Raises ConfigError."""
    env = os.environ if environ is None else environ
    return _LOG_LEVELS[check_choice(*look_up(env, "THALWEG_LOG"), _LOG_LEVELS)]


def _choosing(env: Mapping[str, str], on: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns which variables choose the codec, and remarks, given the switches that are on."""
    switches = [name for name in CODEC_SWITCHES if name in on]
    if env.get("THALWEG_CODEC"):
        ignored = ", ".join(assignments(env, [*switches, *POWERSGD]))
        return ["THALWEG_CODEC"], (f"THALWEG_CODEC wins over {ignored}",) if ignored else ()
    if "THALWEG_POWERSGD_COMPRESSION" not in switches:
        ignored = ", ".join(assignments(env, POWERSGD))
        return switches, (f"{ignored} has no effect without PowerSGD",) if ignored else ()
    remark = "FP16 and PowerSGD together are PowerSGD with fp16 factors"
    return [*switches, *POWERSGD], (remark,) if len(switches) == 2 else ()


def _choose_codec(env: Mapping[str, str]) -> str:
    """Returns THALWEG_CODEC if it is set, else what the switches of AIAK-Training ask for."""
    from thalweg import codecs

    fp16 = is_on(env, "THALWEG_FP16_COMPRESSION")
    powersgd = is_on(env, "THALWEG_POWERSGD_COMPRESSION")
    if env.get("THALWEG_CODEC") or not (fp16 or powersgd):
        return _check_codec(*look_up(env, "THALWEG_CODEC"))
    if not powersgd:
        return codecs.FP16().spec()
    try:
        rank, start = (
            codecs.read_value(codecs.PowerSGD, attribute, *look_up(env, name))
            for attribute, name in (
                ("rank", "THALWEG_MATRIX_APPROXIMATION_RANK"),
                ("start_iter", "THALWEG_START_COMPRESS_ITER"),
            )
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    wire = "fp16" if fp16 else "fp32"
    return codecs.parse(f"powersgd:rank={rank},start={start},wire={wire}").spec()


def _check_codec(what: str, value: Codec | Policy | str) -> str:
    from thalweg import codecs, policy

    if isinstance(value, codecs.Codec | policy.Policy):
        return value.spec()
    if not isinstance(value, str):
        raise ConfigError(
            f"{what} is {value!r}, expected one such as thalweg.PowerSGD(rank=4), a policy, or its "
            "text"
        )
    try:
        return policy.parse(value, what).spec()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_chunk_bytes(what: str, value: str | int) -> int:
    if value == "auto":
        return 0
    number = int(value) if str(value).isdecimal() else -1
    if not MIN_CHUNK_BYTES <= number <= MAX_CHUNK_BYTES:
        bounds = f"{MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise ConfigError(f"{what} is {value!r}, expected auto or a number from {bounds}")
    return number


def _check_count(what: str, value: str | int) -> int:
    if not str(value).isdecimal():
        raise ConfigError(f"{what} is {value!r}, expected a whole number, 0 or more")
    return int(value)


def _check_local_shards(what: str, value: str | bool) -> str:
    return check_choice(what, str(int(value)) if isinstance(value, bool) else value, LOCAL_SHARDS)


def _check_ports(what: str, value: str) -> str:
    ends = value.split("-")
    numbers = [int(end) if end.isdecimal() else -1 for end in ends]
    is_range = len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] < 65536
    if not is_range and not (len(numbers) == 1 and 0 <= numbers[0] < 65536):
        raise ConfigError(f"{what} is {value!r}, expected a port, 0 for any, or FIRST-LAST")
    return value


def _check_timeout(what: str, value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= MAX_TIMEOUT:
        raise ConfigError(
            f"{what} is {value!r}, expected seconds, more than 0 and at most {MAX_TIMEOUT}"
        )
    return number


def _check_step_timeout(what: str, value: str | float) -> float:
    try:
        return 0.0 if value == "auto" else _check_timeout(what, value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or auto") from None


def parse_addresses(what: str, value: str) -> tuple[str, ...]:
    """Splits "host:port,host:port"; the port is a number, the host may be an IPv6 address in []."""
    addresses = tuple(part.strip() for part in value.split(",") if part.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{what} contains {address!r}, expected host:port")
    return addresses


def server_environment(log: str) -> dict[str, str]:
    """Returns the environment for a server program; `log` is the log level unless THALWEG_LOG is
    set.
    """
    return {"THALWEG_LOG": log, **os.environ}
