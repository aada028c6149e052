"""Kubeflow's training operator in a pod, by its own manifests; scripts/test_kube has its image."""

from __future__ import annotations

import os

from kube_cluster import Cluster
from programs import BIN, run

MANIFESTS = os.environ.get("THALWEG_KUBE_OPERATOR", "")
_IMAGE = "image: kubeflow/training-operator:"
_COMMAND = "        - /manager\n"
# Waits for the master's name; the default needs a registry.
_INIT = "        - -pytorch-init-container-image=localhost/busybox:test\n"


def install(cluster: Cluster) -> None:
    """Installs it, and returns when it serves its webhook."""
    lines = []
    for line in run(BIN / "kubectl", "kustomize", MANIFESTS).splitlines(keepends=True):
        if _IMAGE in line:
            line = f"{line.partition('image:')[0]}image: localhost/training-operator:test\n"  # noqa: PLW2901
        lines.append(line + _INIT if line == _COMMAND else line)
    text = "".join(lines)
    assert _INIT in text and _IMAGE not in text
    cluster.kubectl("apply", "--server-side", "--filename=-", text=text)
    where = ("--namespace=kubeflow", "deployment/training-operator")
    cluster.kubectl("rollout", "status", *where, "--timeout=90s")
