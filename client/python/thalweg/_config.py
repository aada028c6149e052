"""Settings from the environment. The one place in Python that reads THALWEG_* variables.

The C++ counterpart is core/base/env.cc; a test keeps the two lists equal.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

KNOWN: dict[str, str] = {
    "THALWEG_AGGREGATORS": "",
    "THALWEG_CHANNELS": "auto",
    "THALWEG_CHUNK_BYTES": "auto",
    "THALWEG_CODEC": "fp32",
    "THALWEG_CPUS": "",
    "THALWEG_HTTP": "",
    "THALWEG_JOB": "",
    "THALWEG_LISTEN": "0.0.0.0:7070",
    "THALWEG_LOG": "info",
    "THALWEG_SIDECAR": "",
    "THALWEG_THREADS": "auto",
    "THALWEG_TIMEOUT": "30",
    "THALWEG_WEIGHT": "1",
    "THALWEG_WINDOW_CHUNKS": "auto",
}

CODECS = ("fp32", "fp16", "bf16")
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20


class ConfigError(ValueError):
    """A setting is malformed, or settings do not fit together."""


@dataclass(frozen=True)
class Config:
    """What a worker or the command line needs to know; servers read their own variables."""

    aggregators: tuple[str, ...]
    chunk_bytes: int  # 0: chosen from what the links carry
    codec: str
    job: str
    sidecar: str
    timeout: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Raises ConfigError naming the variable that is wrong."""
        env = os.environ if environ is None else environ
        if environ is None:
            _warn_of_unknown()

        def get(name: str) -> str:
            return env.get(name) or KNOWN[name]

        return cls(
            aggregators=parse_addresses("THALWEG_AGGREGATORS", get("THALWEG_AGGREGATORS")),
            chunk_bytes=_check_chunk_bytes("THALWEG_CHUNK_BYTES", get("THALWEG_CHUNK_BYTES")),
            codec=_check_codec("THALWEG_CODEC", get("THALWEG_CODEC")),
            job=get("THALWEG_JOB"),
            sidecar=get("THALWEG_SIDECAR"),
            timeout=_check_timeout("THALWEG_TIMEOUT", get("THALWEG_TIMEOUT")),
        )

    def override(self, codec: str | None, timeout: float | None, chunk_bytes: int | None) -> Config:
        """With arguments of the caller, which win over the environment unless they are None."""
        return replace(
            self,
            codec=self.codec if codec is None else _check_codec("codec", codec),
            timeout=self.timeout if timeout is None else _check_timeout("timeout", timeout),
            chunk_bytes=self.chunk_bytes
            if chunk_bytes is None
            else _check_chunk_bytes("chunk_bytes", chunk_bytes),
        )


def _check_codec(what: str, value: str) -> str:
    if value not in CODECS:
        raise ConfigError(f"{what} is {value!r}, expected one of {', '.join(CODECS)}")
    return value


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
