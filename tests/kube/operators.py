"""Installs operators by their own manifests, with images of their programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cluster import FOLDER, Cluster
from nodes import PAUSE_IMAGE
from releases import REGISTRY

_NAME = ["deployment", "training-operator", "--namespace=kubeflow"]


def install_training_operator(cluster: Cluster) -> None:
    """Returns when it takes jobs: its webhook answers."""
    module = Path(os.environ["THALWEG_KUBE_OPERATOR"])
    folder = FOLDER / "operator"
    folder.mkdir()
    container = "/spec/template/spec/containers/0"
    command = ["/manager", f"--pytorch-init-container-image={PAUSE_IMAGE}"]
    probe = {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1}
    patch = [
        {"op": "replace", "path": f"{container}/command", "value": command},
        {"op": "replace", "path": f"{container}/readinessProbe", "value": probe},
    ]
    image = {
        "name": "kubeflow/training-operator",
        "newName": f"{REGISTRY}/training-operator",
        "newTag": module.name.rpartition("@v")[2],
    }
    overlay = {
        "resources": [os.path.relpath(module / "manifests/overlays/standalone", folder)],
        "images": [image],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(overlay), encoding="ascii")
    cluster.kubectl("apply", "--server-side", "--kustomize", folder)
    cluster.kubectl("rollout", "status", *_NAME, "--timeout=120s", seconds=130)


def install_prometheus_operator(cluster: Cluster) -> None:
    """Installs it by its own manifests, with all its definitions. Returns when it runs."""
    bundle = Path(os.environ["THALWEG_KUBE_PROMETHEUS"]) / "bundle.yaml"
    text = bundle.read_text(encoding="utf-8").replace("quay.io/prometheus-operator", REGISTRY)
    cluster.kubectl("apply", "--server-side", "--filename", "-", stdin=text)
    name = ["deployment", "prometheus-operator", "--namespace=default"]
    cluster.kubectl("rollout", "status", *name, "--timeout=120s", seconds=130)
