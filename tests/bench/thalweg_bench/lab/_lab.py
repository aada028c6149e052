"""Implements the laboratory: its lifetime and the links between its namespaces."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from thalweg_bench.lab import _namespaces, _rate
from thalweg_bench.lab._namespaces import INTERFACE, LabError

_MAX_NAMES = 250  # addresses of 10.77.0.0/24
_serials = itertools.count()


class Lab:
    """Namespaces with a veth each to one bridge, which has a namespace of its own.

    A link carries `rate` bits per second in each direction; None: as fast as it goes. `rates` has
    those of single names that differ. TCP uses `congestion`. The machine's own interfaces and rules
    are not touched.

    Everything is gone, processes inside included, when the context ends, this process ends, or,
    had it been killed, when the next lab starts. Not thread-safe; forked children may use it but
    never tear it down. Raises LabError without root or iproute2.
    """

    def __init__(
        self,
        names: Sequence[str],
        rate: int | None = None,
        *,
        rates: Mapping[str, int | None] | None = None,
        congestion: str = "cubic",
    ) -> None:
        for name in names:
            if not re.fullmatch(r"[a-z0-9]{1,20}", name) or name == "bridge":
                raise LabError(
                    f"{name!r} cannot name a namespace: expected up to 20 of a-z and 0-9, "
                    "not 'bridge'"
                )
        if not 1 <= len(set(names)) == len(names) <= _MAX_NAMES:
            raise LabError(f"expected 1 to {_MAX_NAMES} different names, got {len(names)}")
        if unknown := set(rates or {}) - set(names):
            raise LabError(f"rates are given for {sorted(unknown)}, which are not in the lab")
        self.names = tuple(names)
        self._rates = {name: (rates or {}).get(name, rate) for name in names}
        self._congestion = congestion
        self._serial = next(_serials)
        self._owner = os.getpid()
        self._fds: dict[str, int] = {}
        self._old_sigterm: Any = None

    def __enter__(self) -> Lab:
        _namespaces.check_possible()
        _namespaces.remove_leftovers()
        self._owner = os.getpid()
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._old_sigterm = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def enter(self, name: str) -> None:
        """Moves the calling thread into a namespace for good: for children after fork()."""
        _namespaces.enter(self._fds[name])

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Moves the calling thread into the namespace temporarily; its sockets stay there."""
        return _namespaces.inside(self._fds[name])

    def popen(
        self,
        name: str,
        argv: Sequence[str],
        *,
        preexec: Callable[[], None] | None = None,
        **options: Any,  # noqa: ANN401 - Popen's own, which has types for them
    ) -> subprocess.Popen[Any]:
        """Is subprocess.Popen in the namespace. Call it in a process without other threads."""
        return subprocess.Popen(argv, preexec_fn=self.entering(name, preexec), **options)

    def run(
        self,
        name: str,
        argv: Sequence[str],
        **options: Any,  # noqa: ANN401 - as above
    ) -> subprocess.CompletedProcess[Any]:
        """Is subprocess.run in the namespace. Call it in a process without other threads."""
        return subprocess.run(argv, preexec_fn=self.entering(name), **options)

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """Returns a command that runs `argv` in the namespace, for callers to start."""
        return ["ip", "netns", "exec", self._full(name), *argv]

    def entering(self, name: str, then: Callable[[], None] | None = None) -> Callable[[], None]:
        """Returns a preexec_fn for Popen: the child enters the namespace, then calls `then`."""

        def prepare() -> None:
            self.enter(name)
            if then is not None:
                then()

        return prepare

    def close(self) -> None:
        """Ends what runs inside and removes the namespaces. May be called again."""
        if os.getpid() != self._owner:
            return
        with _undisturbed():
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
            _namespaces.remove([self._full(name) for name in ("bridge", *self.names)])
        atexit.unregister(self.close)
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    def _full(self, name: str) -> str:
        return _namespaces.full_name(self._serial, name)

    def _build(self) -> None:
        bridge = self._full("bridge")
        everyone = [bridge, *map(self._full, self.names)]
        _namespaces.batch([f"netns add {namespace}" for namespace in everyone])
        for name in ("bridge", *self.names):
            path = _namespaces.path_of(self._full(name))
            self._fds[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with self.inside(name):
                _namespaces.leave_packets_alone()
        ports = [f"v{index}" for index in range(len(self.names))]
        _namespaces.batch(
            [
                f"link add {INTERFACE} netns {self._full(name)} type veth "
                f"peer name {port} netns {bridge}"
                for name, port in zip(self.names, ports, strict=True)
            ]
        )
        lines = ["link add br0 type bridge", "link set br0 up"]
        lines += [f"link set {port} master br0 up" for port in ports]
        _namespaces.batch(lines, bridge)
        for name in self.names:
            lines = _namespaces.configuration(self.address(name), self._congestion)
            _namespaces.batch(lines, self._full(name))
        shaped = [rate for rate in self._rates.values() if rate is not None]
        if not shaped:
            return
        packet = _rate.packet_bytes(min(shaped))  # it must fit through all links
        for name, port in zip(self.names, ports, strict=True):
            with self.inside(name):
                _namespaces.set_packet_bytes(INTERFACE, packet)
            with self.inside("bridge"):
                _namespaces.set_packet_bytes(port, packet)
            rate = self._rates[name]
            if rate is not None:
                # A namespace's end of the link shapes what it sends, the bridge's end what it
                # receives.
                arguments = _rate.tbf_arguments(rate, packet)
                _namespaces.add_qdisc(bridge, port, arguments)
                _namespaces.add_qdisc(self._full(name), INTERFACE, arguments)


def _exit_on_sigterm(signum: int, _: FrameType | None) -> None:
    sys.exit(128 + signum)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps Ctrl-C and SIGTERM from stopping half-way what is done here."""
    signals = {signal.SIGINT, signal.SIGTERM}
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
