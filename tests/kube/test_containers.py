"""Containers of the chart, without a container engine: the programs with the rendered arguments,
user, capabilities, read-only file system and mounts, in namespaces of their own. Needs root.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rendered import arguments, needs_helm, pod_of, variables

from thalweg import _binaries
from thalweg._job._processes import Server

pytestmark = [
    pytest.mark.alone,
    needs_helm,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: run as root"),
]

SOCKET = "/run/thalweg/sidecar.sock"
CASES = {
    "aggregator": (_binaries.AGGREGATOR, "StatefulSet", "containers", "0.0.0.0:7070"),
    "native sidecar": (_binaries.SIDECAR, "PyTorchJob", "initContainers", SOCKET),
    "machine's sidecar": (_binaries.SIDECAR, "DaemonSet", "containers", SOCKET),
}


def privileges(pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Returns the command that applies the security contexts of pod and container."""
    merged = pod["securityContext"] | container["securityContext"]
    assert merged["allowPrivilegeEscalation"] is False
    assert merged["capabilities"]["drop"] == ["ALL"]
    kept = "".join(f",+{name.lower()}" for name in merged["capabilities"].get("add", []))
    user = ["--reuid", str(merged["runAsUser"]), "--regid", str(merged["runAsGroup"])]
    capabilities = [f"--bounding-set=-all{kept}", f"--inh-caps=-all{kept}"]
    return ["setpriv", *user, "--clear-groups", "--no-new-privs", *capabilities]


def contained(
    pod: dict[str, Any], container: dict[str, Any], folder: Path, command: str
) -> list[str]:
    """Returns a command line: `command` with `folder` at /run/thalweg, its only writable one."""
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    package = _binaries.find(_binaries.SIDECAR).parent.parent
    mounts = f"""
        set -e
        ip link set lo up
        mount -t tmpfs tmpfs /run
        mkdir /run/thalweg /run/package
        mount --bind {shlex.quote(str(folder))} /run/thalweg
        mount --bind {shlex.quote(str(package))} /run/package
        mount -o remount,bind,ro /
        mount -o remount,ro /run
        exec {shlex.join(privileges(pod, container))} {command} "$@"
    """
    return ["unshare", "--mount", "--net", "bash", "-c", mounts, "container"]


@pytest.mark.parametrize("case", CASES)
def test_program_serves_as_the_chart_runs_it_and_ends_by_sigterm(case):
    name, kind, where, address = CASES[case]
    pod = pod_of(kind)
    container = pod[where][0]
    with tempfile.TemporaryDirectory(prefix="kube-") as folder:
        user = pod["securityContext"]["runAsUser"]
        os.chown(folder, user, user)  # fsGroup, or the DaemonSet's first container, does the same
        argv = contained(pod, container, Path(folder), f"/run/package/bin/{name}")
        env = {"PATH": os.environ["PATH"]} | variables(container, "127.0.0.1")
        server = Server(name, [*argv, *arguments(container, env)], env=env)
        try:
            server.wait_ready(20)
            assert server.address == address
            ports = {port["containerPort"] for port in container["ports"]}
            assert int(server.http.rpartition(":")[2]) in ports
        finally:
            code = server.stop(grace=10)
    assert code == 0


def test_machines_folder_is_handed_to_the_sidecars_user():
    pod = pod_of("DaemonSet")
    container = pod["initContainers"][0]
    with tempfile.TemporaryDirectory(prefix="kube-") as folder:
        Path(folder).chmod(0o755)  # the kubelet makes it root's
        argv = contained(pod, container, Path(folder), shlex.join(container["command"]))
        result = subprocess.run(argv, capture_output=True, text=True, timeout=20)
        found = Path(folder).stat()
    assert result.returncode == 0, result.stderr
    user = pod["securityContext"]["runAsUser"]
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (user, user, 0o755)
