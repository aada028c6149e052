"""What helm renders of the chart. scripts/kube_tools.sh brings helm, and Python with YAML."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_VENV = ROOT / ".tools" / "venv" / "bin"
HELM = _VENV / "helm"
_YAML_PYTHON = _VENV / "python"
_TO_JSON = "import json, sys, yaml; print(json.dumps([*yaml.safe_load_all(sys.stdin)]))"
_SETTINGS = (
    "image.registry=registry.test/team,aggregator.replicas=2,"
    "pytorchJob.enabled=true,sidecar.daemonSet.enabled=true"
)

needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no helm in .tools: run `make helm`")


@functools.cache
def _render() -> list[dict[str, Any]]:
    helm = [HELM, "template", "t", ROOT / "helm" / "thalweg", "--kube-version", "1.31"]
    text = subprocess.run([*helm, "--set", _SETTINGS], capture_output=True, check=True, timeout=60)
    parsed = subprocess.run(
        [_YAML_PYTHON, "-c", _TO_JSON],
        input=text.stdout,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [document for document in json.loads(parsed.stdout) if document]


def the(kind: str, ending: str = "") -> dict[str, Any]:
    """The one resource of that kind whose name ends so, with every job and sidecar switched on."""
    found = [d for d in _render() if d["kind"] == kind and d["metadata"]["name"].endswith(ending)]
    assert len(found) == 1, f"{kind} …{ending}: {len(found)}"
    return found[0]


def pod_of(kind: str, ending: str = "") -> dict[str, Any]:
    """The spec of the pods of a workload; of a PyTorchJob, its Master's."""
    spec = the(kind, ending)["spec"]
    spec = spec["pytorchReplicaSpecs"]["Master"] if kind == "PyTorchJob" else spec
    return spec["template"]["spec"]
