"""Tests the chart and a job on a cluster with nodes, which `make test-kube NODES=3` starts."""

from __future__ import annotations

import os
import time

import pytest
from cluster import Cluster
from jobs import NAMESPACE, Job, losses, manifest, outside
from operators import install_training_operator
from nodes import ROOT

NODES = int(os.environ.get("THALWEG_KUBE_NODES", "0"))
CHART = ROOT / "helm" / "thalweg"
WHERE = ["--namespace", NAMESPACE]
# What a machine with two cores can grant to the pods of all its nodes.
VALUES = ",".join(
    [
        "image.registry=registry.example.com/team",
        *(f"{of}.resources.requests.cpu=100m" for of in ("aggregator", "sidecar", "test")),
    ]
)
INSTALL = ["thalweg", CHART, *WHERE, "--create-namespace", "--wait", "--set", VALUES]

pytestmark = [
    pytest.mark.skipif(not NODES, reason="needs a cluster: run `make test-kube NODES=3`"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def cluster():
    folder = ROOT / "out" / "kube"
    started = time.monotonic()
    found = Cluster(folder, NODES, folder / "images.tar")
    found.start()
    print(f"nodes ready after {time.monotonic() - started:.1f} s")
    install_training_operator(found)
    print(f"operator ready after {time.monotonic() - started:.1f} s")
    return found


@pytest.fixture(scope="module")
def release(cluster):
    started = time.monotonic()
    result = cluster.helm("install", *INSTALL)
    assert result.returncode == 0, result.stderr + cluster.nodes[0].log()
    print(f"helm install --wait: {time.monotonic() - started:.1f} s")
    return cluster


def test_release_is_ready_on_different_nodes_and_passes_its_own_test(release):
    pods = release.get("pods", *WHERE)["items"]
    assert len(pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    started = time.monotonic()
    tested = release.helm("test", "thalweg", *WHERE, "--logs")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    print(f"helm test: {time.monotonic() - started:.1f} s\n{tested.stdout}")


def test_operator_runs_the_job_to_the_losses_that_it_has_outside(release):
    started = time.monotonic()
    job = Job(release, manifest())
    assert job.await_end() == "Succeeded", job.describe()
    print(f"job: {time.monotonic() - started:.1f} s")
    said = job.log()
    print(said, release.kubectl("get", "pods", *WHERE, "--output=wide"))
    for pod in job.pods():
        (sidecar,) = (
            status
            for status in pod["status"]["initContainerStatuses"]
            if status["name"] == "thalweg-sidecar"
        )
        assert sidecar["state"]["terminated"]["exitCode"] == 0
    assert "with codec powersgd:rank=4" in said
    assert "2 replicas are bit-identical" in said
    beside = outside()
    assert losses(said) == losses(beside)
    assert len(losses(said)) == 10
    job.delete()
