"""Runs containers on a network of their own.

The caller is the first process in its own network, mount and process namespaces, so that everything
it starts ends with it: scripts/prove_images arranges that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from container import Container

_SWITCH = "switch"
_POLL_SECONDS = 0.2


class Sandbox:
    """The network, host name and IPC of a pod's containers. It ends with this process."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        script = f"hostname {name} && ip link set lo up && echo up && exec cat"
        command = ["unshare", "--net", "--uts", "--ipc", "sh", "-c", script]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n", f"no namespaces for {name}"
        self.pid = self._process.pid

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Network:
    """A bridge with sandboxes that know each other by name."""

    def __init__(self, folder: Path) -> None:
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n", encoding="ascii")
        self._sandboxes: list[Sandbox] = []
        _ip("link set lo up", f"link add {_SWITCH} type bridge")
        _ip(f"addr add 10.88.0.1/24 dev {_SWITCH}", f"link set {_SWITCH} up")

    def add(self, name: str, *names: str) -> Sandbox:
        """Adds a sandbox; others, also earlier ones, find it by `name` and `names`."""
        number = len(self._sandboxes) + 2
        sandbox = Sandbox(name, f"10.88.0.{number}")
        self._sandboxes.append(sandbox)
        _ip(f"link add port{number} type veth peer name eth0 netns {sandbox.pid}")
        _ip(f"link set port{number} master {_SWITCH} up")
        inside = ["nsenter", f"--target={sandbox.pid}", "--net"]
        _ip(f"addr add {sandbox.address}/24 dev eth0", "link set eth0 up", prefix=inside)
        with self.hosts.open("a", encoding="ascii") as file:
            file.write(f"{sandbox.address} {' '.join([name, *names])}\n")
        return sandbox

    def stop(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.stop()
        _ip(f"link del {_SWITCH}")


class Running:
    """A started container. Its output is in `log`."""

    def __init__(self, name: str, container: Container) -> None:
        self.name = name
        self._log = container.folder / "log"
        command = ["setpriv", "--pdeathsig=KILL", *container.argv()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def await_user(self, user: str) -> None:
        """Returns when the program runs as user and group `user`."""
        self.await_(f"user {user}", lambda: self.status("Uid").split() == [user] * 4, 20)
        assert self.status("Gid").split() == [user] * 4, self.name

    def status(self, field: str) -> str:
        """Returns a field of /proc/PID/status of the first process; empty before there is one."""
        if (init := self._init()) is None:
            return ""
        text = Path(f"/proc/{init}/status").read_text(encoding="ascii")
        match = re.search(rf"^{field}:\s*(.*)$", text, re.MULTILINE)
        assert match is not None, field
        return match[1]

    def execute(self, command: Sequence[str]) -> bool:
        """Runs a command in the container as root; returns whether it exists and exits with 0."""
        if (init := self._init()) is None:
            return False
        enter = ["nsenter", f"--target={init}", "--mount", "--net", "--pid", *command]
        silent = subprocess.DEVNULL
        return subprocess.run(enter, stdout=silent, stderr=silent, timeout=30).returncode == 0

    def await_(self, what: str, is_so: Callable[[], bool], seconds: float) -> None:
        """Polls until `is_so`; fails at the deadline or when the container has ended."""
        deadline = time.monotonic() + seconds
        while not is_so():
            # The end of the process is the only event to wait for, and it ends the wait at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_SECONDS)
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < deadline, (
                f"{self.name}: not {what} in {seconds:g} s\n{self.output[-3000:]}"
            )

    def wait(self, seconds: float) -> int:
        """Returns its exit code; 128 + N for signal N, as engines do."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name}: runs for {seconds:g} s\n{self.output}") from None
        return 128 - code if code < 0 else code

    def stop(self, grace: float) -> int:
        """Sends SIGTERM, after `grace` seconds SIGKILL, as engines do; returns the exit code."""
        if (init := self._init()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._process.kill()
        return self.wait(10)

    def _init(self) -> int | None:
        """Returns the first process in the container."""
        pid = self._process.pid
        if self._process.poll() is not None:
            return None
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return int(children[0]) if children else None


def answers(address: str, path: str, scheme: str = "http") -> bool:
    """Returns whether GET succeeds, as an httpGet probe asks."""
    with contextlib.suppress(OSError):
        return _get(address, path, scheme, "") is not None
    return False


def shard(address: str, scheme: str = "http", token: str = "") -> dict[str, float]:
    """Returns an aggregator's report about itself."""
    result: dict[str, float] = json.loads(_get(address, "/api/v1/shard", scheme, token))
    return result


def _get(address: str, path: str, scheme: str, token: str) -> bytes:
    # Like the kubelet, it verifies no certificate.
    tls = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    request = urllib.request.Request(f"{scheme}://{address}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with opener.open(request, timeout=5) as reply:
        body: bytes = reply.read()
        return body


def _ip(*lines: str, prefix: Sequence[str] = ()) -> None:
    for line in lines:
        subprocess.run([*prefix, "ip", *line.split()], check=True)
