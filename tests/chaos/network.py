"""Disturbs the links of a laboratory network."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable

from thalweg_bench.lab import INTERFACE, Lab


class Network:
    """Disturbs the hosts' links. Every method but reset() returns what ends the disturbance."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def cut(self, host: str) -> Callable[[], None]:
        return self._change(host, f"ip link set {INTERFACE} down", f"ip link set {INTERFACE} up")

    def cut_one_way(self, host: str) -> Callable[[], None]:
        """Drops what the host receives by TCP; what it sends arrives."""
        for rule in ("add pref 2 lookup local", "del pref 0"):
            # The rule for local addresses, which is the first one otherwise, goes behind ours.
            self._run(host, f"ip rule {rule}", check=False)
        rule = f"pref 1 dev {INTERFACE} ipproto tcp blackhole"
        return self._change(host, f"ip rule add {rule}", f"ip rule del {rule}")

    def shape(self, host: str, how: str) -> Callable[[], None]:
        """Puts a queueing discipline of tc, with its arguments, on what the host sends."""
        at = f"dev {INTERFACE} root"
        return self._change(host, f"tc qdisc add {at} {how}", f"tc qdisc del {at}")

    def reset(self, host: str, port: int) -> None:
        """Resets the host's connections to and from a TCP port."""
        which = f"( sport = :{port} or dport = :{port} )"
        self._run(host, f"ss -K -H -t state established {which}", check=False)

    def can_reset(self) -> bool:
        """Returns whether the kernel resets connections when it is asked to."""
        host = self._lab.names[0]
        with self._lab.inside(host):
            server = socket.create_server(("127.0.0.1", 0))
            client = socket.create_connection(server.getsockname())
        with server, client:
            self.reset(host, server.getsockname()[1])
            client.setblocking(False)
            try:
                client.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                pass
        return True

    def can(self, how: str) -> bool:
        """Returns whether the kernel has a queueing discipline."""
        try:
            self.shape(self._lab.names[0], how)()
        except subprocess.CalledProcessError:
            return False
        return True

    def _change(self, host: str, begin: str, end: str) -> Callable[[], None]:
        self._run(host, begin)

        def finish() -> None:
            self._run(host, end)

        return finish

    def _run(
        self, host: str, command: str, *, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        return self._lab.run(host, command.split(), check=check, capture_output=True, timeout=20)
