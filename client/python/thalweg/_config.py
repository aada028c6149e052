"""Settings from the environment. The one place in Python that reads THALWEG_* and AIAK_* variables.

The C++ counterpart is core/base/env.cc; a test keeps the two lists equal. This module is part of
every `import torch` (_autoload.py): it imports nothing that torch does not, and has no dataclasses,
which take a millisecond each to define.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from thalweg.codecs import Codec
    from thalweg.policy import Policy

KNOWN: dict[str, str] = {
    "THALWEG_AGGREGATORS": "",
    "THALWEG_CHANNELS": "auto",
    "THALWEG_CHUNK_BYTES": "auto",
    "THALWEG_CODEC": "fp32",
    "THALWEG_COMPAT": "",
    "THALWEG_CPUS": "",
    "THALWEG_ENABLE": "",
    "THALWEG_FP16_COMPRESSION": "0",
    "THALWEG_FUSED_OPTIMIZER": "0",
    "THALWEG_HIERARCHICAL_ALLREDUCE": "0",
    "THALWEG_HTTP": "",
    "THALWEG_HTTP_TOKEN_FILE": "",
    "THALWEG_JOB": "",
    "THALWEG_LISTEN": "0.0.0.0:7070",
    "THALWEG_LOG": "info",
    "THALWEG_MATRIX_APPROXIMATION_RANK": "1",
    "THALWEG_NCCL_LIBRARY": "libnccl.so.2",
    "THALWEG_NODE_REDUCE": "sidecar",
    "THALWEG_POWERSGD_COMPRESSION": "0",
    "THALWEG_SIDECAR": "",
    "THALWEG_START_COMPRESS_ITER": "1000",
    "THALWEG_THREADS": "auto",
    "THALWEG_TIMEOUT": "30",
    "THALWEG_TLS_CA": "",
    "THALWEG_TLS_CERT": "",
    "THALWEG_TLS_KEY": "",
    "THALWEG_TRACE": "",
    "THALWEG_WEIGHT": "1",
    "THALWEG_WINDOW_CHUNKS": "auto",
}

# Variables that AIAK-Training knows as AIAK_…; under its own prefix a variable wins.
_AIAK = {
    f"THALWEG_{name}": f"AIAK_{name}"
    for name in (
        "FP16_COMPRESSION",
        "FUSED_OPTIMIZER",
        "HIERARCHICAL_ALLREDUCE",
        "MATRIX_APPROXIMATION_RANK",
        "POWERSGD_COMPRESSION",
        "START_COMPRESS_ITER",
    )
}
# Any of them activates Thalweg without code, unless THALWEG_ENABLE is 0.
_SWITCHES = (
    "THALWEG_ENABLE",
    "THALWEG_FP16_COMPRESSION",
    "THALWEG_FUSED_OPTIMIZER",
    "THALWEG_HIERARCHICAL_ALLREDUCE",
    "THALWEG_POWERSGD_COMPRESSION",
)
_PARAMETERS = (
    "THALWEG_CODEC",
    "THALWEG_MATRIX_APPROXIMATION_RANK",
    "THALWEG_NODE_REDUCE",
    "THALWEG_START_COMPRESS_ITER",
)
_LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
NODE_REDUCE = ("sidecar", "workers")
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20


class ConfigError(ValueError):
    """A setting is malformed, or settings do not fit together."""


class Config(NamedTuple):
    """What a worker or the command line needs to know; servers read their own variables."""

    aggregators: tuple[str, ...]
    chunk_bytes: int  # 0: chosen from what the links carry
    codec: str  # as Policy.spec() writes it
    job: str
    node_reduce: str  # one of NODE_REDUCE
    sidecar: str
    timeout: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Raises ConfigError naming the variable that is wrong."""
        env = os.environ if environ is None else environ
        if environ is None:
            _warn_of_unknown()

        return cls(
            aggregators=parse_addresses(*_look_up(env, "THALWEG_AGGREGATORS")),
            chunk_bytes=_check_chunk_bytes(*_look_up(env, "THALWEG_CHUNK_BYTES")),
            codec=_choose_codec(env),
            job=_look_up(env, "THALWEG_JOB")[1],
            node_reduce=_check_choice(*_look_up(env, "THALWEG_NODE_REDUCE"), NODE_REDUCE),
            sidecar=_look_up(env, "THALWEG_SIDECAR")[1],
            timeout=_check_timeout(*_look_up(env, "THALWEG_TIMEOUT")),
        )

    def override(self, **arguments: Any) -> Config:  # noqa: ANN401 - each is checked
        """With arguments of the caller, which win over the environment unless they are None."""
        checks: dict[str, Callable[[str, Any], Any]] = {
            "chunk_bytes": _check_chunk_bytes,
            "codec": _check_codec,
            "node_reduce": functools.partial(_check_choice, choices=NODE_REDUCE),
            "timeout": _check_timeout,
        }
        given = {n: checks[n](n, value) for n, value in arguments.items() if value is not None}
        return self._replace(**given)


class SecurityFiles(NamedTuple):
    """Paths; empty: none. The server programs read the same variables."""

    tls_cert: str
    tls_key: str
    tls_ca: str
    http_token: str

    @classmethod
    def from_env(cls) -> SecurityFiles:
        names = ("TLS_CERT", "TLS_KEY", "TLS_CA", "HTTP_TOKEN_FILE")
        return cls(*(os.environ.get(f"THALWEG_{name}", "") for name in names))


class Activation(NamedTuple):
    """What the environment asks for a script that does not mention Thalweg."""

    codec: str  # as Policy.spec() writes it; empty: DistributedDataParallel is left alone
    variables: tuple[str, ...]  # NAME=value of all that had a say
    remarks: tuple[str, ...]  # how they go together, where that is not plain
    fused_optimizer: str  # NAME=value if that is asked for
    log_level: int  # of Python's logging
    timeout: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Activation:
        """Raises ConfigError naming the variable that is wrong."""
        env = os.environ if environ is None else environ
        if environ is None:
            _warn_of_unknown()
        on = [name for name in _SWITCHES if _is_on(env, name)]
        fused = [name for name in on if name == "THALWEG_FUSED_OPTIMIZER"]
        asking = [name for name in on if name not in fused]
        asked = {"THALWEG_POWERSGD_COMPRESSION", "THALWEG_FP16_COMPRESSION"}.intersection(on)
        remarks = []
        if asked and env.get("THALWEG_CODEC"):
            remarks.append("THALWEG_CODEC wins over the other variables")
        elif len(asked) == 2:
            remarks.append("FP16 and PowerSGD together are PowerSGD with fp16 factors")
        return cls(
            codec=_choose_codec(env) if asking else "",
            variables=tuple(_assignments(env, [*asking, *_PARAMETERS])),
            remarks=tuple(remarks),
            fused_optimizer="".join(_assignments(env, fused)),
            log_level=_LOG_LEVELS[_check_choice(*_look_up(env, "THALWEG_LOG"), _LOG_LEVELS)],
            timeout=_check_timeout(*_look_up(env, "THALWEG_TIMEOUT")),
        )


def activation_is_wanted(
    environ: Mapping[str, str] | None = None, switches: Iterable[str] = _SWITCHES
) -> bool:
    """Whether one of `switches` may be on; says so without looking closely, in microseconds."""
    env = os.environ if environ is None else environ
    values = [_look_up(env, name)[1] for name in switches]
    return env.get("THALWEG_ENABLE") != "0" and not {"", "0"}.issuperset(values)


def compat_is_wanted(environ: Mapping[str, str] | None = None) -> tuple[bool, bool]:
    """Whether torch is to have the names of AIAK-Training, and whether there is to be an `apex`.

    Any switch asks for the former. Raises ConfigError for a malformed THALWEG_COMPAT.
    """
    env = os.environ if environ is None else environ
    value = env.get("THALWEG_COMPAT", "")
    _check_choice("THALWEG_COMPAT", value or "0", ("0", "1", "apex"))
    if env.get("THALWEG_ENABLE") == "0" or value == "0":
        return False, False
    return value != "" or activation_is_wanted(env), value == "apex"


def _look_up(env: Mapping[str, str], name: str) -> tuple[str, str]:
    """The variable that says it, and its value; empty ones count as unset."""
    for variable in (name, _AIAK.get(name, name)):
        if env.get(variable):
            return variable, env[variable]
    return name, KNOWN[name]


def _assignments(env: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """NAME=value of those that are set."""
    found = [_look_up(env, name) for name in names]
    return [f"{variable}={value}" for variable, value in found if env.get(variable)]


def _is_on(env: Mapping[str, str], name: str) -> bool:
    variable, value = _look_up(env, name)
    return _check_choice(variable, value or "0", ("0", "1")) == "1"


def _choose_codec(env: Mapping[str, str]) -> str:
    """THALWEG_CODEC if it is set, else what the switches of AIAK-Training say."""
    from thalweg import codecs

    fp16 = _is_on(env, "THALWEG_FP16_COMPRESSION")
    powersgd = _is_on(env, "THALWEG_POWERSGD_COMPRESSION")
    if env.get("THALWEG_CODEC") or not (fp16 or powersgd):
        return _check_codec(*_look_up(env, "THALWEG_CODEC"))
    if not powersgd:
        return codecs.FP16().spec()
    try:
        rank, start = (
            codecs.read_value(codecs.PowerSGD, attribute, *_look_up(env, name))
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
    try:
        number = int(value)
    except ValueError:
        number = -1
    if not MIN_CHUNK_BYTES <= number <= MAX_CHUNK_BYTES:
        raise ConfigError(
            f"{what} is {value!r}, expected auto or a number from {MIN_CHUNK_BYTES} to "
            f"{MAX_CHUNK_BYTES}"
        )
    return number


def _check_choice(what: str, value: str, choices: Iterable[str]) -> str:
    *others, last = choices
    if value not in (*others, last):
        raise ConfigError(f"{what} is {value!r}, expected {', '.join(others)} or {last}")
    return value


def _check_timeout(what: str, value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 86400:
        raise ConfigError(f"{what} is {value!r}, expected seconds, more than 0 and at most 86400")
    return number


def parse_addresses(what: str, value: str) -> tuple[str, ...]:
    """Splits "host:port,host:port"; the port is a number, the host may be an IPv6 address in []."""
    addresses = tuple(part.strip() for part in value.split(",") if part.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{what} contains {address!r}, expected host:port")
    return addresses


def server_environment(log: str) -> dict[str, str]:
    """The environment for a server program; `log` is how much it says unless THALWEG_LOG is set."""
    return {"THALWEG_LOG": log, **os.environ}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    return sorted(n for n in environ if n.startswith("THALWEG_") and n not in KNOWN)


@functools.cache
def _warn_of_unknown() -> None:
    for name in unknown_variables(os.environ):
        logging.getLogger("thalweg").warning(
            "unknown environment variable %s is ignored; known are %s", name, ", ".join(KNOWN)
        )
