"""The chart and the jobs of deploy/jobs on a real cluster of three nodes, which `make test-kube`
builds.
"""

from __future__ import annotations

import pytest
from release import CODEC, Job, Release, is_ready, losses, losses_outside, needs_cluster

pytestmark = [needs_cluster, pytest.mark.alone, pytest.mark.timeout(600)]


def test_release_is_ready_on_different_nodes_and_passes_its_own_test(release, record_property):
    pods = release.aggregators()
    assert len(pods) == 2 and all(map(is_ready, pods))
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    before = release.rounds()
    assert "Phase:          Succeeded" in release.helm("test", "thalweg", "--logs")
    assert all(a > b for a, b in zip(release.rounds(), before, strict=True))


def test_pytorchjob_with_native_sidecars_learns_what_it_learns_outside(release, tmp_path):
    job = Job(release, "pytorchjob.yaml")
    assert job.await_end() == "Succeeded", job.describe()
    log = job.first_log()
    assert "with codec powersgd:rank=4" in log
    assert "2 replicas are bit-identical" in log
    assert losses(log) == losses_outside(2, tmp_path, **CODEC)
    for pod in job.pods():
        sidecar = pod["status"]["initContainerStatuses"][0]
        assert sidecar["state"]["terminated"]["exitCode"] == 0, job.describe()
    job.delete()


def test_job_without_release_and_operator_learns_what_it_learns_outside(cluster, tmp_path):
    alone = Release(cluster, "alone")
    cluster.kubectl("create", "namespace", "alone")
    job = Job(alone, "indexed-job.yaml")
    assert job.await_end() == "Succeeded", job.describe()
    log = job.first_log()
    assert "3 replicas are bit-identical" in log
    assert losses(log) == losses_outside(3, tmp_path)
    job.delete()


def test_machines_sidecars_serve_a_job(cluster, tmp_path):
    machines = Release(cluster, "machines")
    machines.install("sidecar.daemonSet.enabled=true,aggregator.replicas=1")
    job = Job(machines, "pytorchjob-node-sidecar.yaml")
    assert job.await_end() == "Succeeded", job.describe()
    log = job.first_log()
    assert "with codec powersgd:rank=4" in log
    assert losses(log) == losses_outside(2, tmp_path, **CODEC)
    job.delete()
    machines.helm("uninstall", "thalweg", "--wait")
