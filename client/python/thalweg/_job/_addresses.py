"""Finds the address under which other hosts reach this one.

The environment may name an interface. Otherwise the route to the host of the process group's store
decides, which for that host itself is a loopback address: then a route to another host does.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import random
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thalweg._settings._config import ConfigError, Network

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_SOME_PORT = 9  # nothing is sent to it


class Candidate(NamedTuple):
    address: str
    rule: str  # where it comes from


Interfaces = Mapping[str, Sequence[str]]  # addresses by name


class System(NamedTuple):
    """What is asked of the operating system."""

    interfaces: Callable[[], Interfaces]
    is_ours: Callable[[str], bool]
    source_to: Callable[[str], str]


def interfaces() -> dict[str, list[str]]:
    """Returns this host's interfaces and their addresses, IPv4 first.

    A link-local IPv6 address is only there where there is no other.
    """
    found = {}
    ipv6 = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            addresses = []
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                addresses.append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
            addresses += [str(one) for one in ipv6.get(name, ()) if not one.is_link_local]
            found[name] = addresses or [f"{one}%{name}" for one in ipv6.get(name, ())]
    return found


def is_ours(address: str) -> bool:
    """Returns whether an address is one of this host's."""
    try:
        for family, kind, _, _, target in _resolve(address):
            with socket.socket(family, kind) as trial:
                trial.bind((target[0], 0, *target[2:]))
    except OSError:
        return False
    return True


def source_to(host: str) -> str:
    """Returns the address from which this host sends to another one. Raises OSError."""
    problem = OSError(f"{host} has no address")
    for family, kind, _, _, target in _resolve(host):
        try:
            with socket.socket(family, kind) as unused:
                unused.connect(target)  # for UDP, this only looks up the route
                return str(unused.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


SYSTEM = System(interfaces, is_ours, source_to)


def candidate(network: Network, store_host: str, system: System = SYSTEM) -> Candidate:
    """Returns the address that this host would publish if it knew no other one.

    Raises ConfigError if the environment names an interface that does not exist.
    """
    if is_address(network.interface):
        rule = f"THALWEG_INTERFACE={network.interface}"
        if is_wildcard(network.interface) or not system.is_ours(network.interface):
            raise _unknown(f"{rule} is not an address of this host", system.interfaces())
        return Candidate(network.interface, rule)
    for variable, spec, choose in (
        ("THALWEG_INTERFACE", network.interface, _listed),
        ("GLOO_SOCKET_IFNAME", network.gloo_interfaces, _listed),
        ("NCCL_SOCKET_IFNAME", network.nccl_interfaces, _chosen_by_nccl),
    ):
        if spec:
            found = system.interfaces()
            addresses = [address for name in choose(spec, found) for address in found[name]]
            if not addresses:
                raise _unknown(f"{variable}={spec} names no interface with an address", found)
            return Candidate(addresses[0], f"{variable}={spec}")
    return _by_route(store_host or network.master, system)


def settle(
    hosts: Sequence[str], candidates: Sequence[str], me: int, system: System = SYSTEM
) -> str:
    """Returns the address that the host of worker `me` publishes.

    `hosts` and `candidates` are those of all workers; an empty candidate is none. Other hosts
    cannot use a loopback address: the route to the first one with a better candidate decides then.
    """
    others = [
        address
        for host, address in zip(hosts, candidates, strict=True)
        if host != hosts[me] and address and not is_loopback(address)
    ]
    if is_loopback(candidates[me]) and others:
        with contextlib.suppress(OSError):
            return system.source_to(others[0])
    return candidates[me]


def is_address(text: str) -> bool:
    return _parse(text) is not None


def is_loopback(host: str) -> bool:
    address = _parse(host)
    return host == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    address = _parse(host)
    return address is not None and address.is_unspecified


def join(host: str, ports: str) -> str:
    """Returns HOST:PORTS; an IPv6 address gets brackets."""
    return f"[{host}]:{ports}" if ":" in host else f"{host}:{ports}"


def host_in(address: str) -> str:
    """Returns the host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def check_published(host_name: str, address: str) -> None:
    """Raises ConfigError if other hosts cannot reach what a host publishes as its address."""
    if is_loopback(address) or is_wildcard(address):
        raise ConfigError(
            f"thalweg: {host_name} would publish {address} as the address of the shard that it "
            "hosts, at which no other host can reach it: set THALWEG_INTERFACE there to the "
            "interface or the address of the network between the hosts, or give its sidecar's "
            "--shard-listen such an address"
        )


def describe(found: Interfaces) -> str:
    """Describes interfaces for messages."""
    return ", ".join(f"{name} ({', '.join(its) or 'no address'})" for name, its in found.items())


def _listed(spec: str, found: Interfaces) -> list[str]:
    """Returns the interfaces of a list of names that exist."""
    return [name.strip() for name in spec.split(",") if name.strip() in found]


def _chosen_by_nccl(spec: str, found: Interfaces) -> list[str]:
    """Returns the interfaces that NCCL would take: by prefix, "=" by name, "^" all but these.

    Loopback is last where only others are excluded.
    """
    excludes = spec.startswith("^")
    names = spec.removeprefix("^")
    exact = names.startswith("=")
    named = [name.strip() for name in names.removeprefix("=").split(",") if name.strip()]
    chosen = [
        name
        for name in found
        if any(name == one if exact else name.startswith(one) for one in named) != excludes
    ]
    if excludes:
        chosen.sort(key=lambda name: all(is_loopback(address) for address in found[name]))
    return chosen


def _by_route(host: str, system: System) -> Candidate:
    if not host:
        return Candidate(LOOPBACK, "there is no MASTER_ADDR to find the route to")
    try:
        return Candidate(system.source_to(host), f"the route to {host}")
    except OSError as error:
        return Candidate(LOOPBACK, f"there is no route to {host}: {error}")


def _unknown(problem: str, found: Interfaces) -> ConfigError:
    return ConfigError(f"{problem}: {socket.gethostname()} has {describe(found)}")


def _parse(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _resolve(host: str) -> list[tuple[Any, ...]]:
    return list(socket.getaddrinfo(host, _SOME_PORT, type=socket.SOCK_DGRAM))


def _ipv6_addresses() -> dict[str, list[ipaddress.IPv6Address]]:
    found: dict[str, list[ipaddress.IPv6Address]] = {}
    with contextlib.suppress(OSError):  # there is no IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return found


def free_port() -> int:
    """Returns a port of this machine that nobody uses, and that the kernel gives to nobody who asks
    for any.
    """
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")
    first_given = max(int(ports.split()[0]), 2048)
    while True:
        port = random.randrange(1024, first_given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
