"""PyTorchJobs of deploy/jobs/pytorchjob.yaml on a cluster of this machine, and the same outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from cluster import Cluster
from nodes import ROOT
from until import until

NAMESPACE = "ml"
SELECTOR = "training.kubeflow.org/job-name"
_MANIFEST = ROOT / "deploy" / "jobs" / "pytorchjob.yaml"
_COMMAND = "[torchrun, /opt/thalweg/examples/train.py]"
AIAK = {
    "AIAK_POWERSGD_COMPRESSION": "1",
    "AIAK_MATRIX_APPROXIMATION_RANK": "4",
    "AIAK_START_COMPRESS_ITER": "10",
}


def manifest(name: str = "ddp", steps: int = 100) -> str:
    """Returns the manifest, with requests of CPU that the cores of a small machine can grant to
    all its nodes' pods.
    """
    text = _MANIFEST.read_text(encoding="utf-8")
    text = re.sub(r'cpu: "\d"', "cpu: 100m", text).replace("name: ddp\n", f"name: {name}\n")
    assert _COMMAND in text
    return text.replace(_COMMAND, f"{_COMMAND[:-1]}, --steps={steps}]")


class Job:
    """A PyTorchJob in the cluster."""

    def __init__(self, cluster: Cluster, text: str) -> None:
        self._cluster = cluster
        answer = cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", "-o", "json", stdin=text)
        self.name = json.loads(answer)["metadata"]["name"]

    def pods(self) -> list[dict[str, Any]]:
        """Returns the master and then the workers."""
        selector = f"--selector={SELECTOR}={self.name}"
        items = self._cluster.get("pods", "-n", NAMESPACE, selector)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"]["name"]))

    def log(self, pod: str = "master-0", container: str = "pytorch") -> str:
        where = ["-n", NAMESPACE, f"{self.name}-{pod}", "-c", container]
        return self._cluster.kubectl("logs", *where)

    def end(self) -> str:
        """Returns Succeeded or Failed; empty while it runs."""
        job = self._cluster.get("pytorchjob", "-n", NAMESPACE, self.name)
        conditions = job.get("status", {}).get("conditions") or []
        true = [c["type"] for c in conditions if c["status"] == "True"]
        return next((end for end in ("Succeeded", "Failed") if end in true), "")

    def await_end(self, seconds: float = 240) -> str:
        return until("the end of the job", self.end, seconds, self.describe)

    def await_step(self, step: int, seconds: float = 120) -> None:
        """Returns when the master has logged the step."""

        def is_there() -> bool:
            running = self.pods() and self.pods()[0]["status"]["phase"] == "Running"
            return bool(running and f"step {step}:" in self.log())

        until(f"step {step}", is_there, seconds, self.describe)

    def describe(self) -> str:
        """Returns what kubectl says about its pods, and the end of their logs."""
        selector = ["-n", NAMESPACE, f"--selector={SELECTOR}={self.name}"]
        logs = ["logs", *selector, "--all-containers", "--prefix", "--tail=40", "--ignore-errors"]
        return self._cluster.kubectl("describe", "pods", *selector)[-3000:] + self._cluster.kubectl(
            *logs
        )

    def delete(self) -> None:
        self._cluster.kubectl("delete", "pytorchjob", "-n", NAMESPACE, self.name)
        until("the end of the pods", lambda: not self.pods(), 90, self.describe)


def losses(log: str) -> list[str]:
    return re.findall(r"^step \d+: loss .*$", log, re.MULTILINE)


def outside(steps: int = 100) -> str:
    """Runs the same script with the same variables and two shards as processes of this machine;
    returns what it prints.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("THALWEG_", "AIAK_"))} | AIAK
    argv = [sys.executable, "-m", "thalweg", "run", "--nodes=2", "--nproc=1"]
    argv += [str(ROOT / "deploy" / "train.py"), f"--steps={steps}"]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr
