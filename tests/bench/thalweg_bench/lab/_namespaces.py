"""Makes network namespaces with ip, tc and setns."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACE = "eth0"  # in every namespace
_FOLDER = Path("/run/netns")
_PREFIX = "thalweg"
_CLONE_NEWNET = 0x40000000
_RTM_NEWLINK = 16
_NLM_F_REQUEST_ACK = 1 | 4
_SIZE_ATTRIBUTES = (41, 58, 63, 64)  # IFLA_{GSO,GRO}_MAX_SIZE, IFLA_{GSO,GRO}_IPV4_MAX_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


class LabError(RuntimeError):
    """The laboratory cannot be set up here."""


def check_possible() -> None:
    """Raises LabError that says what is missing."""
    if os.geteuid() != 0:
        raise LabError(
            f"the lab needs root to make network namespaces, this is user {os.geteuid()}: run it "
            "as root, for instance with sudo"
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise LabError(f"the lab needs the program '{program}': install the package iproute2")


def full_name(serial: int, name: str) -> str:
    """Returns a name that contains the owner, so that leftovers can be told from what is in use."""
    return f"{_PREFIX}{os.getpid()}-{serial}-{name}"


def path_of(namespace: str) -> Path:
    return _FOLDER / namespace


def batch(lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs `ip` commands, by default in this process's namespace."""
    inside = [] if namespace is None else ["-n", namespace]
    _run(["ip", *inside, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def configuration(address: str, congestion: str) -> list[str]:
    """Returns lines for batch() that bring up a namespace with that address.

    The routes say which congestion control TCP uses: a namespace's sysctl accepts only what the
    machine allows to everybody. The addresses of the namespace itself have routes of their own.
    """
    cc = f"congctl {congestion}"
    local = "table local proto kernel scope host"
    return [
        f"addr add {address}/24 dev {INTERFACE}",
        "link set lo up",
        f"link set {INTERFACE} up",
        f"route replace 10.77.0.0/24 dev {INTERFACE} proto kernel src {address} {cc}",
        f"route replace local {address} dev {INTERFACE} {local} src {address} {cc}",
        f"route replace local 127.0.0.0/8 dev lo {local} src 127.0.0.1 {cc}",
        f"route replace local 127.0.0.1 dev lo {local} src 127.0.0.1 {cc}",
    ]


def leave_packets_alone() -> None:
    """Disables in the calling thread's namespace what a plain switch would not do.

    Neighbour discovery of IPv6 is traffic, and bridged packets would pass through iptables.
    """
    for setting, value in (
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("bridge/bridge-nf-call-iptables", "0"),
        ("bridge/bridge-nf-call-arptables", "0"),
    ):
        path = Path("/proc/sys/net", setting)
        if path.exists():
            path.write_text(value, encoding="ascii")


def set_packet_bytes(interface: str, size: int) -> None:
    """Sets, in the calling thread's namespace, how large packets are that the device would cut by
    itself.

    `ip link` of Debian 12 can do that for IPv6 only; therefore this uses netlink.
    """
    attributes = b"".join(struct.pack("=HHI", 8, kind, size) for kind in _SIZE_ATTRIBUTES)
    link = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(interface), 0, 0)
    length = 16 + len(link) + len(attributes)
    header = struct.pack("=IHHII", length, _RTM_NEWLINK, _NLM_F_REQUEST_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(header + link + attributes)
        (code,) = struct.unpack_from("=i", netlink.recv(4096), 16)
    if code != 0:
        raise LabError(f"packets of {size} bytes on {interface}: {os.strerror(-code)}")


def add_qdisc(namespace: str, interface: str, arguments: Sequence[str]) -> None:
    _run(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *arguments], "")


def enter(fd: int) -> None:
    """Moves the calling thread into the network namespace behind `fd`."""
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


@contextlib.contextmanager
def inside(fd: int) -> Iterator[None]:
    """Moves the calling thread into that namespace temporarily; sockets opened there stay in it."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(fd)
        try:
            yield
        finally:
            enter(own)
    finally:
        os.close(own)


def remove(namespaces: Sequence[str]) -> None:
    """Kills what runs in them, except this process, and deletes them."""
    inodes = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            inodes.add(path_of(namespace).stat().st_ino)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if (entry / "ns/net").stat().st_ino in inodes:
                os.kill(int(entry.name), signal.SIGKILL)
    present = [namespace for namespace in namespaces if path_of(namespace).exists()]
    if present:
        batch([f"netns del {namespace}" for namespace in present])


def remove_leftovers() -> None:
    """Removes the namespaces of labs whose owner has ended without removing them."""
    if not _FOLDER.is_dir():
        return
    dead = []
    for path in _FOLDER.iterdir():
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\d+-.+", path.name)
        if match and not Path("/proc", match[1]).exists():
            dead.append(path.name)
    if dead:
        remove(dead)


def _run(argv: Sequence[str], text: str) -> None:
    result = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        given = f"\nits input:\n{text.rstrip()}" if text else ""
        raise LabError(f"{' '.join(argv)}: {result.stderr.strip()}{given}")
