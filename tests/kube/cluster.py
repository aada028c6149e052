"""Runs a Kubernetes cluster on this machine: control plane and DNS on node 1, nodes of nodes.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from api_server import BIN, ApiServer
from nodes import Node, make_switch
from rendered import HELM
from until import until

_COREFILE = """.:53 {{
  bind {address}
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig} local
  }}
  cache 1
}}
"""
_FLAGS = "--kubelet-preferred-address-types=InternalIP"
_IMPORT_SECONDS = 240


class Cluster:
    """`count` nodes with the images of `archive`. Files and logs are in `folder`."""

    def __init__(self, folder: Path, count: int, archive: Path) -> None:
        make_switch()
        self.nodes = [Node(folder / f"node{i}", i) for i in range(1, count + 1)]
        first = self.nodes[0]
        self._archive = archive
        self.api = ApiServer(folder, first.address, first.enter, _FLAGS)
        self._env = os.environ | {"KUBECONFIG": str(self.api.kubeconfig)}

    def start(self) -> None:
        for node in self.nodes:
            node.start_containerd()
        self.api.start()
        self._start_control_plane()
        imports = []
        for node in self.nodes:
            node.await_containerd()
            imports.append(node.import_images(self._archive))
        for node, process in zip(self.nodes, imports, strict=True):
            assert process.wait(_IMPORT_SECONDS) == 0, node.log()
        for node in self.nodes:
            node.start_kubelet(self.api.kubeconfig)
        until("nodes ready", self._is_ready, 90, self.nodes[-1].log)

    def kubectl(self, *arguments: object, stdin: str = "", seconds: float = 120) -> str:
        """Returns what it prints. Raises AssertionError with what it says."""
        result = self._run("kubectl", *arguments, stdin=stdin, seconds=seconds)
        assert result.returncode == 0, f"{arguments}: {result.stderr}"
        return result.stdout

    def helm(self, *arguments: object, seconds: float = 180) -> subprocess.CompletedProcess[str]:
        return self._run(HELM, *arguments, seconds=seconds)

    def get(self, *arguments: object) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def _run(
        self, *arguments: object, stdin: str = "", seconds: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in arguments],
            env=self._env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def _start_control_plane(self) -> None:
        first, folder = self.nodes[0], self.api.folder
        access = f"--kubeconfig={self.api.kubeconfig}"
        first.spawn(
            "kube-controller-manager",
            access,
            "--leader-elect=false",
            f"--service-account-private-key-file={folder / 'sa.key'}",
            f"--root-ca-file={self.api.ca_certificate()}",
            f"--cert-dir={folder / 'pki'}",
            f"--flex-volume-plugin-dir={folder / 'volume-plugins'}",
        )
        first.spawn("kube-scheduler", access, "--leader-elect=false")
        corefile = folder / "Corefile"
        text = _COREFILE.format(address=first.address, kubeconfig=self.api.kubeconfig)
        corefile.write_text(text, encoding="ascii")
        first.spawn("coredns", "-conf", str(corefile))

    def _is_ready(self) -> bool:
        conditions = [
            condition["status"]
            for node in self.get("nodes")["items"]
            for condition in node["status"]["conditions"]
            if condition["type"] == "Ready"
        ]
        return conditions == ["True"] * len(self.nodes)
