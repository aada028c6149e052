"""Installs Kubeflow's training operator by its own manifests, with an image of its program."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cluster import Cluster
from nodes import PAUSE_IMAGE
from until import until

_IMAGE = "registry.example.com/team/training-operator"
_NAME = ["deployment", "training-operator", "--namespace=kubeflow"]


def install_training_operator(cluster: Cluster) -> None:
    """Returns when it takes jobs: its webhook answers."""
    module = Path(os.environ["THALWEG_KUBE_OPERATOR"])
    folder = cluster.api.folder / "operator"
    folder.mkdir()
    container = "/spec/template/spec/containers/0"
    command = ["/manager", f"--pytorch-init-container-image={PAUSE_IMAGE}"]
    probe = {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1}
    patch = [
        {"op": "replace", "path": f"{container}/command", "value": command},
        {"op": "replace", "path": f"{container}/readinessProbe", "value": probe},
    ]
    overlay = {
        "resources": [os.path.relpath(module / "manifests/overlays/standalone", folder)],
        "images": [
            {
                "name": "kubeflow/training-operator",
                "newName": _IMAGE,
                "newTag": module.name.rpartition("@v")[2],
            }
        ],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(overlay), encoding="ascii")
    cluster.kubectl("apply", "--server-side", "--kustomize", folder)
    cluster.kubectl("rollout", "status", *_NAME, "--timeout=120s", seconds=130)
