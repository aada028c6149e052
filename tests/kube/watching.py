"""Runs Prometheus and Alertmanager in pods, which the Prometheus operator makes."""

from __future__ import annotations

import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from cluster import Cluster
from releases import REGISTRY
from waiting import until

_RIGHTS = ("service-account", "cluster-role", "cluster-role-binding")


class Watch:
    """A Prometheus that reads every monitor and rule of the cluster, and its Alertmanager."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster = cluster
        rbac = Path(os.environ["THALWEG_KUBE_PROMETHEUS"]) / "example" / "rbac" / "prometheus"
        for name in _RIGHTS:
            cluster.kubectl("apply", "--filename", rbac / f"prometheus-{name}.yaml")
        for resource in (_prometheus(node), _alertmanager(node)):
            cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(resource))
        for name in ("prometheus-lab", "alertmanager-lab"):
            until(name, lambda name=name: self._is_ready(f"{name}-0"), 120)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series that PromQL finds."""
        where = f"query?query={urllib.parse.quote(expression)}"
        answer = self._get("prometheus-lab-0:9090", f"api/v1/{where}")
        return list(answer["data"]["result"])

    def alerts(self) -> set[str]:
        """Returns the names of alerts that have reached the Alertmanager."""
        found = self._get("alertmanager-lab-0:9093", "api/v2/alerts")
        return {str(alert["labels"]["alertname"]) for alert in found}

    def _get(self, pod: str, path: str) -> Any:
        where = f"/api/v1/namespaces/default/pods/{pod}/proxy/{path}"
        return json.loads(self._cluster.kubectl("get", "--raw", where))

    def _is_ready(self, pod: str) -> bool:
        found = self._cluster.get("pods", "--namespace=default", "--ignore-not-found", pod)
        states = found.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in states)


def _prometheus(node: str) -> dict[str, Any]:
    anything = {
        f"{of}{selector}": {}
        for of in ("serviceMonitor", "podMonitor", "rule")
        for selector in ("Selector", "NamespaceSelector")
    }
    alertmanager = {"namespace": "default", "name": "alertmanager-operated", "port": "web"}
    spec = _spec("prometheus", "v2.55.1", node) | anything
    spec |= {"serviceAccountName": "prometheus", "evaluationInterval": "5s"}
    return _resource("Prometheus", spec | {"alerting": {"alertmanagers": [alertmanager]}})


def _alertmanager(node: str) -> dict[str, Any]:
    return _resource("Alertmanager", _spec("alertmanager", "v0.27.0", node))


def _spec(image: str, version: str, node: str) -> dict[str, Any]:
    return {
        "image": f"{REGISTRY}/{image}:{version}",
        "imagePullPolicy": "IfNotPresent",
        "version": version,
        "replicas": 1,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "resources": {"requests": {"memory": "100Mi"}},
    }


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = "monitoring.coreos.com/v1"
    metadata = {"name": "lab", "namespace": "default"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
