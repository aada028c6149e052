"""Runs a Kubernetes cluster on this machine: control plane and DNS on node 1, nodes of nodes.py."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from api_server import ROOT, ApiServer
from nodes import Node, make_switch
from rendered import HELM
from waiting import until

NODES = int(os.environ.get("THALWEG_KUBE_NODES", "0"))
FOLDER = ROOT / "out" / "kube"
ARCHIVE = FOLDER / "images.tar"
_COREFILE = """.:53 {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig} local
  }}
  cache 1
}}
"""
_FLAGS = "--kubelet-preferred-address-types=InternalIP"
_IMPORT_SECONDS = 240


def needs_nodes(count: int) -> list[pytest.MarkDecorator]:
    reason = f"needs a cluster of {count} nodes: run `make test-kube`, as root"
    return [pytest.mark.skipif(count > NODES, reason=reason), pytest.mark.timeout(1500)]


def statuses(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns those of all its containers, also of those that run beside the main one."""
    status = pod["status"]
    return [*status.get("initContainerStatuses", []), *status["containerStatuses"]]


class Cluster:
    """`count` nodes with the images of ARCHIVE. Files and logs are in FOLDER."""

    def __init__(self, count: int) -> None:
        make_switch()
        self.nodes = [Node(FOLDER / f"node{i}", i) for i in range(1, count + 1)]
        first = self.nodes[0]
        self.api = ApiServer(FOLDER, first.address, first.enter, _FLAGS, "/var/lib/etcd")
        self._env = os.environ | {"KUBECONFIG": str(self.api.kubeconfig)}

    def start(self) -> None:
        for node in self.nodes:
            node.start_containerd()
        self.api.start()
        self._start_control_plane()
        imports = []
        for node in self.nodes:
            node.await_containerd()
            imports.append(node.import_images(ARCHIVE))
        for node, process in zip(self.nodes, imports, strict=True):
            assert process.wait(_IMPORT_SECONDS) == 0, node.log()
        for node in self.nodes:
            node.start_kubelet(self.api.kubeconfig)
        until("nodes ready", self.is_ready, 240, self.nodes[-1].log)

    def is_ready(self) -> bool:
        """Whether all nodes are."""
        conditions = [
            condition["status"]
            for node in self.get("nodes")["items"]
            for condition in node["status"]["conditions"]
            if condition["type"] == "Ready"
        ]
        return conditions == ["True"] * len(self.nodes)

    def node_of(self, pod: dict[str, Any]) -> Node:
        return next(node for node in self.nodes if node.name == pod["spec"]["nodeName"])

    def kill(self, pod: dict[str, Any], container: str) -> None:
        """Kills the container's first process, and with it the others."""
        (found,) = [status for status in statuses(pod) if status["name"] == container]
        _, _, number = found["containerID"].rpartition("//")
        tasks = ["ctr", "--namespace", "k8s.io", "tasks"]
        self.node_of(pod).run(*tasks, "kill", "--signal=SIGKILL", number)

    def kubectl(self, *arguments: object, stdin: str = "", seconds: float = 120) -> str:
        """Returns what it prints. Raises AssertionError with what it says."""
        result = self.run("kubectl", *arguments, stdin=stdin, seconds=seconds)
        assert result.returncode == 0, f"{arguments}: {result.stderr}"
        return result.stdout

    def helm(self, *arguments: object, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        return self.run(HELM, *arguments, seconds=seconds)

    def get(self, *arguments: object) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def run(
        self, *arguments: object, stdin: str = "", seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with access to the cluster."""
        return subprocess.run(
            [str(word) for word in arguments],
            env=self._env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def _start_control_plane(self) -> None:
        first = self.nodes[0]
        access = f"--kubeconfig={self.api.kubeconfig}"
        first.spawn(
            "kube-controller-manager",
            access,
            "--leader-elect=false",
            f"--service-account-private-key-file={FOLDER / 'sa.key'}",
            f"--root-ca-file={self.api.ca_certificate()}",
            f"--cert-dir={FOLDER / 'pki'}",
            f"--flex-volume-plugin-dir={FOLDER / 'volume-plugins'}",
        )
        first.spawn("kube-scheduler", access, "--leader-elect=false")
        corefile = FOLDER / "Corefile"
        text = _COREFILE.format(address=first.address, kubeconfig=self.api.kubeconfig)
        corefile.write_text(text, encoding="ascii")
        first.spawn("coredns", "-conf", str(corefile))
