"""Jobs of deploy/jobs on a cluster of this machine, and the same outside."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

from api_server import ROOT
from cluster import Cluster
from releases import NAMESPACE
from waiting import until

AIAK = {
    "AIAK_POWERSGD_COMPRESSION": "1",
    "AIAK_MATRIX_APPROXIMATION_RANK": "4",
    "AIAK_START_COMPRESS_ITER": "10",
}
STEPS = 200  # of a job during which something happens
_CODEC = re.compile(r'( +)- name: AIAK_P.*?value: "10"\n', re.DOTALL)  # with the AIAK variables
_COMMAND = "[torchrun, /opt/thalweg/examples/train.py]"


class _Kind(NamedTuple):
    label: str  # of a job's pods
    container: str  # in which the training runs
    succeeded: str  # the condition at a good end


_KINDS = {
    "pytorchjob.kubeflow.org": _Kind("training.kubeflow.org/job-name", "pytorch", "Succeeded"),
    "job.batch": _Kind("batch.kubernetes.io/job-name", "node", "Complete"),
}


def manifest(file: str = "pytorchjob", steps: int = 100, codec: str = "") -> str:
    """Returns a file of deploy/jobs, with requests of CPU that the cores of a small machine can
    grant to all its nodes' pods; with a codec, if there is one, in place of the file's.
    """
    text = (ROOT / "deploy" / "jobs" / f"{file}.yaml").read_text(encoding="utf-8")
    text = re.sub(r'cpu: "\d"', "cpu: 100m", text)
    if codec:
        text, count = _CODEC.subn(rf"\1- name: THALWEG_CODEC\n\1  value: {codec}\n", text)
        assert count == 1
    if steps == 100:
        return text
    assert _COMMAND in text
    return text.replace(_COMMAND, f"{_COMMAND[:-1]}, --steps={steps}]")


class Job:
    """A job in the cluster, made of a manifest."""

    def __init__(self, cluster: Cluster, text: str, namespace: str = NAMESPACE) -> None:
        self._cluster = cluster
        self._where = ["--namespace", namespace]
        self._text = text
        made = cluster.kubectl("create", *self._where, "-f", "-", "-o", "name", stdin=text).split()
        self._resource = next(name for name in made if name.split("/")[0] in _KINDS)
        kind, self.name = self._resource.split("/")
        self._kind = _KINDS[kind if "." in kind else f"{kind}.batch"]
        self._selector = f"--selector={self._kind.label}={self.name}"

    def pods(self) -> list[dict[str, Any]]:
        """Returns the pod of rank 0 and then the others."""
        items = self._cluster.get("pods", *self._where, self._selector)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"]["name"]))

    def log(self, pod: int = 0) -> str:
        name = self.pods()[pod]["metadata"]["name"]
        return self._cluster.kubectl("logs", *self._where, name, "-c", self._kind.container)

    def logs(self) -> str:
        """Returns what all its pods have logged."""
        return "\n".join(self.log(pod) for pod in range(len(self.pods())))

    def end(self) -> str:
        """Returns Succeeded or Failed; empty while it runs."""
        status = self._cluster.get(self._resource, *self._where).get("status", {})
        true = [c["type"] for c in status.get("conditions") or [] if c["status"] == "True"]
        if self._kind.succeeded in true:
            return "Succeeded"
        return "Failed" if "Failed" in true else ""

    def await_end(self) -> str:
        return until("the end of the job", self.end, 600, self.describe)

    def await_text(self, text: str) -> None:
        """Returns when the pod of rank 0 has logged the text."""

        def is_there() -> bool:
            pods = self.pods()
            return bool(pods) and _has_started(pods[0]) and text in self.log()

        until(f"'{text}' in the log", is_there, 300, self.describe)

    def describe(self) -> str:
        """Returns what kubectl says about its pods, and the end of their logs."""
        selector = [*self._where, self._selector]
        logs = ["logs", *selector, "--all-containers", "--prefix", "--tail=40", "--ignore-errors"]
        return self._cluster.kubectl("describe", "pods", *selector)[-3000:] + self._cluster.kubectl(
            *logs
        )

    def delete(self) -> None:
        self._cluster.kubectl("delete", *self._where, "-f", "-", stdin=self._text)
        until("the end of the pods", lambda: not self.pods(), 180, self.describe)


def _has_started(pod: dict[str, Any]) -> bool:
    return pod["status"]["phase"] in ("Running", "Succeeded", "Failed")


def losses(log: str) -> list[str]:
    return re.findall(r"step \d+: loss \S+", log)


@functools.cache
def outside(nodes: int = 2, steps: int = 100, codec: str = "") -> list[str]:
    """Returns the losses of the same script, with the same variables, in processes of this
    machine.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("THALWEG_", "AIAK_"))}
    # Bits depend on how many threads torch has: in the pods all cores, in `thalweg run` one.
    env |= {"OMP_NUM_THREADS": str(os.cpu_count())} | ({"THALWEG_CODEC": codec} if codec else AIAK)
    argv = [sys.executable, "-m", "thalweg", "run", f"--nodes={nodes}", "--nproc=1"]
    argv += [str(ROOT / "deploy" / "train.py"), f"--steps={steps}"]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{nodes} replicas are bit-identical" in result.stdout
    return losses(result.stdout)
