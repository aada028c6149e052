"""The nodes of THALWEG_ELASTIC, and which of them this one is."""

from __future__ import annotations

from typing import NamedTuple

from thalweg._job import _addresses
from thalweg._settings._config import ConfigError, Elastic

_PORT = 29555  # unless a node has its own


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def find(nodes: str | None = None, node: int | None = None) -> tuple[tuple[Address, ...], int]:
    """Returns the addresses of all nodes and the number of this one; the environment has what is
    None. Raises ConfigError.
    """
    settings = Elastic.from_env()
    text = settings.nodes if nodes is None else nodes
    if not text:
        raise ConfigError(
            "THALWEG_ELASTIC is not set, expected host or host:port of every node that the job may "
            "have, comma separated, the same on all nodes"
        )
    addresses = tuple(_parse(part.strip()) for part in text.split(","))
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"THALWEG_ELASTIC is {text!r}: a node is named twice")
    if node is None:
        node = _which(addresses) if settings.node is None else settings.node
    if not 0 <= node < len(addresses):
        raise ConfigError(
            f"THALWEG_ELASTIC_NODE is {node}, expected 0 to {len(addresses) - 1}: THALWEG_ELASTIC "
            f"names {len(addresses)} nodes"
        )
    return addresses, node


def _parse(text: str) -> Address:
    """Reads HOST, HOST:PORT or [HOST]:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, str(_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"THALWEG_ELASTIC has {text!r}, expected host or host:port")
    return Address(host, int(port))


def _which(addresses: tuple[Address, ...]) -> int:
    ours = [number for number, one in enumerate(addresses) if _addresses.is_ours(one.host)]
    if len(ours) == 1:
        return ours[0]
    found = f"{len(ours)} of them are" if ours else "none of them is"
    raise ConfigError(
        f"THALWEG_ELASTIC names {', '.join(map(str, addresses))}, and {found} this host's: set "
        "THALWEG_ELASTIC_NODE to this node's place in the list, from 0"
    )
