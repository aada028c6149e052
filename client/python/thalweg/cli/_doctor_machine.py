"""What an installer asks of a machine, for `thalweg doctor`: GPUs, their driver and torch's build,
NCCL, bfloat16, MPS, RDMA, the link to other hosts, and the address that Gloo gives these. Nothing
of it is needed, so nothing fails.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from thalweg._job import _addresses
from thalweg._settings._config import ConfigError, Network
from thalweg._settings._variables import look_up
from thalweg.cli._finding import Finding

_ROOT = Path("/")
_LOAD_SECONDS = 30.0
# A process of its own loads NCCL as a sidecar does, without the libraries that torch has loaded.
_ASK_NCCL = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""


class Build(NamedTuple):
    """What torch says of GPUs."""

    cuda: str  # the version of CUDA for which it is built; empty: for CPUs only
    gpus: tuple[str, ...]  # that it can use
    problem: str = ""  # why it can use none


def findings(network: Network) -> Iterator[Finding]:
    build = torchs_build()
    yield gpus(build, driver())
    if build.gpus:
        yield nccl(look_up("THALWEG_NCCL_LIBRARY")[1])
        yield mps(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    yield bfloat16()
    yield rdma()
    yield link(network)
    yield gloo(network, socket.gethostname())


def torchs_build() -> Build:
    import torch

    if torch.version.cuda is None:
        return Build("", ())
    try:
        torch.cuda.init()
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return Build(torch.version.cuda, (), str(error).partition("\n")[0])
    names = (f"{one.name} ({one.total_memory / 2**30:.0f} GiB)" for one in found)
    return Build(torch.version.cuda, tuple(names))


def driver(root: Path = _ROOT) -> str:
    """Returns the version of NVIDIA's driver; empty: it is not loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else "of unknown version"


def gpus(build: Build, driver: str) -> Finding:
    built = f"torch is built for CUDA {build.cuda}" if build.cuda else "torch is built for CPUs"
    if build.gpus:
        return Finding("ok", f"GPUs: {', '.join(build.gpus)}; {built}, the driver is {driver}")
    if driver and not build.cuda:
        remedy = "install a torch that is built for CUDA to train on its GPUs"
        return Finding("warn", f"GPUs: the driver {driver} is loaded, but {built} only: {remedy}")
    if driver:
        return Finding("warn", f"GPUs: {built}, and cannot use driver {driver}: {build.problem}")
    return Finding("note", f"GPUs: NVIDIA's driver is not loaded, and {built}; gradients are CPUs'")


def nccl(library: str) -> Finding:
    """Says whether sidecars find NCCL, which they need between GPUs of a node."""
    command = [sys.executable, "-c", _ASK_NCCL, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_SECONDS)
    if done.returncode == 0:
        number = int(done.stdout)  # 22703 is 2.27.3
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return Finding("ok", f"NCCL: {library} is version {version}")
    reason = done.stderr.strip().rpartition("\n")[2]
    remedy = "sidecars need it for several GPUs of a node: set THALWEG_NCCL_LIBRARY to its path"
    return Finding("warn", f"NCCL: {library} cannot be used ({reason}): {remedy}")


def mps(pipes: str) -> Finding:
    if (Path(pipes) / "control").exists():
        return Finding("note", f"MPS: a daemon's pipes are in {pipes}; this was not tried")
    return Finding("ok", "MPS: no daemon runs")


def bfloat16() -> Finding:
    from thalweg import fsdp

    ready = fsdp.bf16_ready()
    return Finding("ok" if ready else "note", f"bfloat16: {ready}")


def rdma(root: Path = _ROOT) -> Finding:
    try:
        names = sorted(path.name for path in (root / "sys/class/infiniband").iterdir())
    except OSError:
        names = []
    if not names:
        return Finding("ok", "RDMA: there are no devices, and none are needed")
    advice = "Thalweg uses TCP and leaves them idle; NCCL can use them"
    return Finding("note", f"RDMA: {', '.join(names)}: {advice}")


def link(network: Network, root: Path = _ROOT) -> Finding:
    """Says how fast the interface is that the address for other hosts belongs to."""
    try:
        address = _addresses.candidate(network, "").address
    except ConfigError as error:
        return Finding("note", f"link: {error}")
    if _addresses.is_loopback(address):
        return Finding("note", f"link: {address} is loopback's, which is no link to other hosts")
    names = [name for name, found in _addresses.interfaces().items() if address in found]
    name = names[0] if names else address
    try:
        mbits = int((root / "sys/class/net" / name / "speed").read_text("ascii"))
    except (OSError, ValueError):
        mbits = -1
    if mbits <= 0:
        measured = "a job measures it when it begins"
        return Finding("note", f"link: {name} does not say how fast it is; {measured}")
    return Finding("ok", f"link: {name} is one of {mbits / 1000:g} Gbit/s")


def gloo(network: Network, host: str) -> Finding:
    """Says at which address torch's Gloo lets other hosts connect: that of the host's name."""
    if network.gloo_interfaces:
        return Finding(
            "ok", f"Gloo: other hosts reach {network.gloo_interfaces} (GLOO_SOCKET_IFNAME)"
        )
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = "127.0.0.1"  # which Gloo takes then
    if _addresses.is_loopback(address):
        where = f"stands for {address}, at which no other host reaches it"
        remedy = "in a job of several hosts, set GLOO_SOCKET_IFNAME to the interface between them"
        return Finding("note", f"Gloo: this host's name, {host}, {where}: {remedy}")
    return Finding("ok", f"Gloo: other hosts reach {address}, for which the name {host} stands")
