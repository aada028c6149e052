"""Installs the chart on a cluster of this machine."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from api_server import ROOT
from cluster import Cluster
from waiting import until

CHART = ROOT / "helm" / "thalweg"
NAMESPACE = "ml"
REGISTRY = "registry.example.com/team"
# What a machine with two cores can grant to the pods of all its nodes.
_REQUESTS = [f"{of}.resources.requests.cpu=100m" for of in ("aggregator", "sidecar", "test")]
VALUES = ["--set", ",".join([f"image.registry={REGISTRY}", *_REQUESTS])]


class Release:
    """The release "thalweg" in a namespace."""

    def __init__(self, cluster: Cluster, namespace: str = NAMESPACE) -> None:
        self.cluster = cluster
        self.where = ["--namespace", namespace]

    def install(self, *values: object) -> None:
        """Returns when it is ready."""
        self._helm("install", "thalweg", CHART, "--create-namespace", "--wait", *VALUES, *values)

    def template(self, name: str, *values: object) -> str:
        """Returns what a template makes of these values."""
        show = ["--show-only", f"templates/{name}.yaml", "--kube-version", "1.31"]
        return self._helm("template", "thalweg", CHART, *show, *VALUES, *values)

    def make_namespace(self) -> None:
        text = json.dumps(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )
        self.cluster.kubectl("apply", "-f", "-", stdin=text)

    def upgrade(self, *values: object) -> None:
        """Changes these values of the defaults, and returns when the pods are ready with them."""
        result = self.try_upgrade(*values)
        assert result.returncode == 0, result.stderr + self.describe()
        self.await_ready()

    def try_upgrade(self, *values: object) -> subprocess.CompletedProcess[str]:
        argv = ["upgrade", "thalweg", CHART, *self.where, "--wait", "--timeout=9m", *VALUES]
        return self.cluster.helm(*argv, *values)

    def rollback(self) -> None:
        """Returns when the last release is there again."""
        self._helm("rollback", "thalweg", "--wait")
        self.await_ready()

    def test(self) -> str:
        """Runs `helm test`; returns the log of its pod."""
        return self._helm("test", "thalweg", "--logs")

    def uninstall(self) -> None:
        self._helm("uninstall", "thalweg", "--wait")
        until("no aggregators", lambda: not self.aggregators(), 60)

    def aggregators(self) -> list[dict[str, Any]]:
        selector = "--selector=app.kubernetes.io/component=aggregator"
        items = self.cluster.get("pods", *self.where, selector)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"]["name"]))

    def await_ready(self) -> None:
        """Returns when all aggregators are as the release wants them."""
        name = "statefulset/thalweg-aggregator"
        self.cluster.kubectl("rollout", "status", name, *self.where, "--timeout=150s", seconds=160)

    def kill(self, shard: int) -> float:
        """Kills the shard's process, as a crash does; returns when."""
        self.cluster.kill(self.aggregators()[shard], "aggregator")
        return time.monotonic()

    def await_return(self, shard: int, restarts: int, seconds: float) -> None:
        """Returns when the shard's container is ready after so many restarts."""

        def is_back() -> bool:
            status = _status(self.aggregators(), shard)
            return status.get("restartCount") == restarts and bool(status["ready"])

        until(f"restart {restarts} of shard {shard}", is_back, seconds, self.describe)

    def await_next(self, shard: int, uid: str) -> None:
        """Returns when another pod than that one serves as the shard."""

        def is_there() -> bool:
            others = [pod for pod in self.aggregators() if pod["metadata"]["uid"] != uid]
            return bool(_status(others, shard).get("ready"))

        until(f"another pod of shard {shard}", is_there, 120, self.describe)

    def describe(self) -> str:
        """Returns what kubectl says about its pods."""
        return self.cluster.kubectl("describe", "pods", *self.where)[-4000:]

    def _helm(self, *arguments: object) -> str:
        result = self.cluster.helm(*arguments, *self.where)
        assert result.returncode == 0, f"{result.stdout}{result.stderr}\n{self.describe()}"
        return result.stdout


def _status(pods: list[dict[str, Any]], shard: int) -> dict[str, Any]:
    """Returns the status of a shard's container; empty while there is none."""
    name = f"thalweg-aggregator-{shard}"
    statuses = [p["status"].get("containerStatuses") for p in pods if p["metadata"]["name"] == name]
    return dict(statuses[0][0]) if statuses and statuses[0] else {}
