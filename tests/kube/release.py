"""Releases of the chart and jobs on a test's cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kube_cluster import Cluster
from programs import ROOT, run
from rendered import HELM
from training_operator import MANIFESTS
from until import until

needs_cluster = pytest.mark.skipif(
    not MANIFESTS, reason="needs a cluster: run `make test-kube` as root"
)
CHART = ROOT / "helm" / "thalweg"
JOBS = ROOT / "deploy" / "jobs"
# The cluster's nodes share the machine's cores, so requests must be small for pods to fit.
_SMALL = "resources.requests.cpu=100m"
SETTINGS = f"image.registry=localhost,aggregator.{_SMALL},sidecar.{_SMALL},test.{_SMALL}"
SETTINGS += ",aggregator.drainSeconds=5"
CODEC = {
    "AIAK_POWERSGD_COMPRESSION": "1",
    "AIAK_MATRIX_APPROXIMATION_RANK": "4",
    "AIAK_START_COMPRESS_ITER": "10",
}
READY_SECONDS = 60.0
JOB_SECONDS = 180.0


class Release:
    """A release named `thalweg`, which gives its resources that name."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def install(self, *settings: str) -> float:
        """Installs or upgrades; returns after how many seconds everything was ready."""
        values = [f"--set={value}" for value in (SETTINGS, *settings)]
        start = time.monotonic()
        self.helm("upgrade", "--install", "thalweg", CHART, "--create-namespace", *values, "--wait")
        return time.monotonic() - start

    def helm(self, *arguments: object) -> str:
        where = [f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.namespace}"]
        return run(HELM, *where, *arguments, timeout=180)

    def kubectl(self, *arguments: object, text: str | None = None) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, text=text)

    def try_kubectl(self, *arguments: object) -> str:
        """Returns what kubectl prints, whether it succeeds or not."""
        done = self.cluster.try_kubectl(f"--namespace={self.namespace}", *arguments)
        return done.stdout + done.stderr

    def get(self, *arguments: object) -> Any:
        return self.cluster.get(f"--namespace={self.namespace}", *arguments)

    def aggregators(self) -> list[dict[str, Any]]:
        """Returns the shards' pods, in order."""
        label = "--selector=app.kubernetes.io/component=aggregator"
        pods: list[dict[str, Any]] = self.get("pods", label)["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def rounds(self) -> list[float]:
        """Returns how many rounds each shard has completed."""
        return [_shard(pod["status"]["podIP"])["rounds"] for pod in self.aggregators()]

    def await_rounds(self, job: Job) -> None:
        """Returns when every shard has taken part in further rounds."""
        before = self.rounds()
        until(
            "rounds are completed",
            lambda: all(a > b for a, b in zip(self.rounds(), before, strict=True)),
            JOB_SECONDS,
            job.describe,
        )

    def await_ready(self) -> float:
        """Returns after how many seconds all shards are ready, and were not deleted."""
        start = time.monotonic()
        where = ("statefulset/thalweg-aggregator", f"--timeout={READY_SECONDS:.0f}s")
        self.kubectl("rollout", "status", *where)
        until("all shards are ready", self._all_ready, READY_SECONDS)
        return time.monotonic() - start

    def _all_ready(self) -> bool:
        pods = self.aggregators()
        wanted = self.get("statefulset", "thalweg-aggregator")["spec"]["replicas"]
        return len(pods) == wanted and all(is_ready(pod) for pod in pods)


class Job:
    """A PyTorchJob of deploy/jobs, or a batch Job, in the namespace of a release."""

    def __init__(
        self, release: Release, file: str, changes: Mapping[str, str] | None = None
    ) -> None:
        """Creates it; `changes` say what is replaced in the manifest, and by what."""
        self._release = release
        text = (JOBS / file).read_text(encoding="utf-8")
        text = with_small_requests(text.replace("registry.example.com/team/", "localhost/"))
        for old, new in (changes or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        kind = re.findall(r"^kind: (\w+)$", text, re.MULTILINE)[0].lower()
        self.name = re.findall(r"^  name: (\S+)$", text, re.MULTILINE)[0]
        self._what = f"{kind}/{self.name}"
        self._text = text
        label = (
            "batch.kubernetes.io/job-name" if kind == "job" else "training.kubeflow.org/job-name"
        )
        self._selector = f"--selector={label}={self.name}"
        release.kubectl("apply", "--filename=-", text=text)

    def pods(self) -> list[dict[str, Any]]:
        """Returns its pods, the one with rank 0 first."""
        pods: list[dict[str, Any]] = self._release.get("pods", self._selector)["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def log(self, pod: str, container: str = "pytorch") -> str:
        return self._release.kubectl("logs", pod, f"--container={container}")

    def first_log(self) -> str:
        return self.log(self.pods()[0]["metadata"]["name"])

    def describe(self) -> str:
        """Returns what is to be known when it does not do what it should."""
        told = [self._release.kubectl("describe", "pods", self._selector)[-6000:]]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
                command = ("logs", name, f"--container={container['name']}", "--tail=20")
                told += [f"--- {name} {container['name']}", self._release.try_kubectl(*command)]
        return "\n".join(told)

    def await_end(self, seconds: float = JOB_SECONDS) -> str:
        """Returns Succeeded or Failed."""
        return until(f"{self._what} has ended", self._ended, seconds, self.describe)

    def _ended(self) -> str:
        status = self._release.get(self._what).get("status", {})
        true = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
        if true & {"Succeeded", "Complete"}:
            return "Succeeded"
        return "Failed" if "Failed" in true else ""

    def delete(self) -> None:
        """Deletes it, and waits until its pods are gone."""
        self._release.kubectl("delete", "--filename=-", "--wait", text=self._text)
        until("its pods are gone", lambda: not self.pods(), READY_SECONDS, self.describe)


def with_small_requests(text: str) -> str:
    """Returns a manifest whose pods fit nodes that share the cores of one machine."""
    return re.sub(r'cpu: "\d"', "cpu: 100m", text).replace("memory: 4Gi", "memory: 512Mi")


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    deleted = "deletionTimestamp" in pod["metadata"]
    return conditions.get("Ready") == "True" and not deleted


def losses(log: str) -> list[str]:
    """Returns the lines of deploy/train.py that tell losses."""
    return re.findall(r"step \d+: loss [\d.]+", log)


def losses_outside(nodes: int, folder: Path, steps: int = 100, **env: str) -> list[str]:
    """Trains on this machine without any container, and returns the losses."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("THALWEG_", "AIAK_"))}
    argv = [Path(sys.executable).parent / "thalweg", "run", f"--nodes={nodes}", "--nproc=1"]
    argv += [ROOT / "deploy" / "train.py", f"--steps={steps}"]
    words = [str(word) for word in argv]
    ran = subprocess.run(
        words, env=own | env, cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return losses(ran.stdout)


def _shard(address: str) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}:7071/api/v1/shard", timeout=5) as reply:
        report: dict[str, float] = json.loads(reply.read())
    return report
