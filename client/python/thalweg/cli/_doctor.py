"""`thalweg doctor` checks that this machine has what Thalweg needs."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from thalweg import __version__, _binaries
from thalweg._job import _addresses
from thalweg._settings._config import ConfigError, Network, SecurityFiles
from thalweg.cli import _doctor_machine, _doctor_variables, _probe

_CONNECT_SECONDS = 2.0
_SIMD_FLAGS = ("avx512f", "avx2", "sse4_2", "sve", "asimd")  # best first; as in /proc/cpuinfo


def doctor(aggregators: Sequence[str], sidecar: str, network: Network) -> int:
    """Prints one line per check and returns the exit code."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("thalweg", lambda: __version__),
        ("python", lambda: f"{platform.python_version()} ({sys.executable})"),
        ("torch", lambda: version("torch")),
        ("kernel", lambda: f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("extension", _extension),
        (_binaries.SIDECAR, lambda: _binary(_binaries.SIDECAR)),
        (_binaries.AGGREGATOR, lambda: _binary(_binaries.AGGREGATOR)),
        ("shared memory", _sealed_memfd),
        ("Unix sockets", _descriptor_passing),
        ("/dev/shm", _shm),
        ("SIMD", _simd),
        ("address for other hosts", lambda: _address(network)),
    ]
    if sidecar:
        checks.append(("sidecar", lambda: _connect_sidecar(sidecar)))
    files = SecurityFiles.from_env()
    for index, address in enumerate(aggregators):
        ask = functools.partial(_probe.probe, address, files, _CONNECT_SECONDS)
        checks.append((f"aggregator {index}", ask))

    failed = [name for name, check in checks if not _report(name, check)]
    if "extension" not in failed:  # which needs torch, as the machine's facts do
        for finding in _doctor_machine.findings(network):
            print(finding)
    meanings = {} if _binaries.SIDECAR in failed else _doctor_variables.meanings()
    wrong = 0
    for finding in _doctor_variables.findings(os.environ, meanings):
        print(finding)
        wrong += finding.level == "FAIL"
    if not aggregators:
        print("note  no aggregators are configured: the sidecars of a job's nodes host its shards;")
        print("      on one machine no network is saved: expect no speed-up")
    print(f"{len(checks) - len(failed)} of {len(checks) + wrong} checks passed")
    return 1 if failed or wrong else 0


def _report(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok    {name}: {check()}")
    except (
        OSError,
        ImportError,
        RuntimeError,
        ConfigError,
        subprocess.SubprocessError,
    ) as error:
        print(f"FAIL  {name}: {error}")
        return False
    return True


def _extension() -> str:
    import torch  # noqa: F401 - its libraries must be loaded before the extension

    from thalweg import _C

    return str(_C.__file__)


def _binary(name: str) -> str:
    path = _binaries.find(name)
    result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    if result.returncode != 0:
        raise RuntimeError(f"{path} --version: {result.stderr.strip()}")
    return f"{result.stdout.strip()} ({path})"


def _sealed_memfd() -> str:
    fd = os.memfd_create("thalweg-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return "memfd with seals works"
        raise RuntimeError("a sealed memfd could be truncated")
    finally:
        os.close(fd)


def _descriptor_passing() -> str:
    with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
        path = str(Path(folder) / "doctor.sock")
        with (
            socket.socket(socket.AF_UNIX) as server,
            socket.socket(socket.AF_UNIX) as client,
            Path(os.devnull).open("rb") as file,
        ):
            server.bind(path)
            server.listen()
            client.connect(path)
            accepted, _ = server.accept()
            with accepted:
                socket.send_fds(client, [b"x"], [file.fileno()])
                _, fds, _, _ = socket.recv_fds(accepted, 1, 1)
        if len(fds) != 1:
            raise RuntimeError("file descriptors cannot be passed")
        os.close(fds[0])
        return f"sockets in {Path(folder).parent} pass file descriptors"


def _shm() -> str:
    stats = os.statvfs("/dev/shm")
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free (Thalweg uses none of it)"


def _simd() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return next((flag for flag in _SIMD_FLAGS if flag in flags), "none known: scalar code is used")


def _address(network: Network) -> str:
    """What this host would publish if its sidecar hosted a shard."""
    found = _addresses.candidate(network, "")
    ports = "any port" if network.shard_ports == "0" else f"port {network.shard_ports}"
    text = f"{found.address}, {ports} ({found.rule}; THALWEG_INTERFACE, THALWEG_SHARD_PORTS)"
    if _addresses.is_loopback(found.address):
        text += "; in a job of several hosts, the route to another one decides"
    return text


def _connect_sidecar(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(path)
        except OSError as error:
            raise RuntimeError(f"{path} cannot be reached: {error}") from error
    return f"{path} accepts connections"
