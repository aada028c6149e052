"""Renders the chart with helm. scripts/kube_tools.sh brings helm, and Python with YAML."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_VENV = ROOT / ".tools" / "venv" / "bin"
HELM = _VENV / "helm"
_YAML_PYTHON = _VENV / "python"
_TO_JSON = "import json, sys, yaml; print(json.dumps([*yaml.safe_load_all(sys.stdin)]))"
_SETTINGS = "image.registry=registry.test/team,aggregator.replicas=2"
# The chart refuses these two together.
_JOBS, _MACHINES = "pytorchJob.enabled=true", "sidecar.daemonSet.enabled=true"

# These are settings for the(…) and pod_of(…).
TLS = (
    "tls.enabled=true,tls.certManager.enabled=true,tls.certManager.issuerRef.name=thalweg,"
    "httpToken.secret=page,"
    "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true"
)

needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no helm in .tools: run `make helm`")


@functools.cache
def _render(settings: str) -> list[dict[str, Any]]:
    helm = [HELM, "template", "t", ROOT / "helm" / "thalweg", "--kube-version", "1.31"]
    helm += ["--set", f"{_SETTINGS},{settings}"]
    text = subprocess.run(helm, capture_output=True, check=True, timeout=60)
    parsed = subprocess.run(
        [_YAML_PYTHON, "-c", _TO_JSON],
        input=text.stdout,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [document for document in json.loads(parsed.stdout) if document]


def the(kind: str, ending: str = "", settings: str = "") -> dict[str, Any]:
    """Returns the one resource of that kind with this ending, of a release with a DaemonSet if that
    is its kind, else of one with a job.
    """
    documents = _render(f"{_MACHINES if kind == 'DaemonSet' else _JOBS},{settings}")
    all_of_kind = [document for document in documents if document["kind"] == kind]
    found = [document for document in all_of_kind if document["metadata"]["name"].endswith(ending)]
    assert len(found) == 1, f"{kind} …{ending}: {len(found)}"
    return found[0]


def pod_of(kind: str, ending: str = "", settings: str = "") -> dict[str, Any]:
    """Returns the spec of a workload's pods; of a PyTorchJob's, its Master's."""
    spec = the(kind, ending, settings)["spec"]
    spec = spec["pytorchReplicaSpecs"]["Master"] if kind == "PyTorchJob" else spec
    return spec["template"]["spec"]


def variables(container: dict[str, Any], pod_ip: str) -> dict[str, str]:
    """Returns a container's variables; the only field that they refer to is the pod's address."""
    fields = [v["valueFrom"]["fieldRef"] for v in container["env"] if "value" not in v]
    assert all(field == {"fieldPath": "status.podIP"} for field in fields)
    return {v["name"]: v.get("value", pod_ip) for v in container["env"]}


def arguments(container: dict[str, Any], env: dict[str, str]) -> list[str]:
    """Returns a container's arguments with $(NAME) replaced, as the kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], a) for a in container["args"]]
