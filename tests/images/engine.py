"""Runs containers with podman, on the images and with the settings of scripts/build_images."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
_SETTINGS = ROOT / ".tools" / "containers.conf"
ENV = os.environ | {"CONTAINERS_CONF": str(_SETTINGS)}
# What the chart asks of every program of ours.
LOCKED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def podman(*arguments: object, seconds: float = 60) -> str:
    """Runs podman; returns what it prints. Raises AssertionError with what it says."""
    argv = ["podman", *map(str, arguments)]
    result = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, f"{' '.join(argv)}\n{result.stderr}"
    return result.stdout.strip()


@functools.cache
def _missing(*names: str) -> str:
    """Returns why tests of these images cannot run; empty if they can."""
    built = os.environ.get("THALWEG_TEST_IMAGES", "").split()
    absent = [name for name in names if name not in built]
    if not absent:
        return ""
    return f"runs containers of {' and '.join(absent)}: `make test-images`, as root"


def needs_images(*names: str) -> pytest.MarkDecorator:
    reason = _missing(*names)
    return pytest.mark.skipif(bool(reason), reason=reason)


def image(name: str) -> dict[str, Any]:
    """Returns what the engine knows of an image."""
    (found,) = json.loads(podman("image", "inspect", f"localhost/thalweg-{name}"))
    return dict(found)


def assert_locked(container: str) -> None:
    """Asserts that a container's program is the user 65532, can do nothing more than any user, and
    cannot write to its root.
    """
    status = podman("exec", "--user=0", container, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["65532"] * 4
    assert {fields[name].strip("0") for name in ("CapEff", "CapBnd")} == {""}
    with pytest.raises(AssertionError, match="Read-only file system"):
        podman("exec", "--user=0", container, "touch", "/opt/thalweg/new")


@contextlib.contextmanager
def network() -> Iterator[str]:
    """Makes a network of containers, which this machine reaches too; takes it and them away."""
    name = f"thalweg-test-{os.getpid()}"
    podman("network", "create", name)
    try:
        yield name
    finally:
        podman("network", "rm", "--force", name)


class Container:
    """A running container of one of our images."""

    def __init__(self, name: str, network: str, *options: str, command: tuple[str, ...] = ()):
        argv = ["--detach", f"--network={network}", *LOCKED, *options, f"localhost/thalweg-{name}"]
        self.id = podman("run", *argv, *command)

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(podman("container", "inspect", self.id))
        return dict(found)

    @property
    def address(self) -> str:
        (network,) = self.inspect()["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def get(self, port: int, path: str) -> bytes | None:
        """Returns what the container answers over HTTP; None unless it is 200."""
        with contextlib.suppress(OSError):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://{self.address}:{port}{path}", timeout=5) as reply:
                body: bytes = reply.read()
                return body
        return None

    def await_ready(self, port: int) -> None:
        until("ready", lambda: self.get(port, "/readyz") is not None, 30, self.logs)

    def logs(self) -> str:
        argv = ["podman", "logs", self.id]
        result = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=30)
        return result.stdout + result.stderr

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        podman("stop", "--time=20", self.id)
        return int(self.inspect()["State"]["ExitCode"])

    def remove(self) -> None:
        podman("rm", "--force", "--time=0", self.id)
