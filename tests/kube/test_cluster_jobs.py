"""Tests jobs of deploy/jobs on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

from cluster import needs_nodes, statuses
from kube_jobs import Job, losses, manifest, outside
from timing import timed

pytestmark = needs_nodes(3)


def run(cluster, file, namespace="ml"):
    """Runs a job to its end; returns its log."""
    with timed(f"{file}.yaml, from kubectl create to Succeeded"):
        job = Job(cluster, manifest(file), namespace)
        assert job.await_end() == "Succeeded", job.describe()
    assert all(is_well(pod) for pod in job.pods())
    log = job.log()
    job.delete()
    return log


def is_well(pod):
    """Whether all its containers ended with 0."""
    return all(status["state"]["terminated"]["exitCode"] == 0 for status in statuses(pod))


def test_operator_runs_the_job_with_native_sidecars_to_the_losses_that_it_has_outside(release):
    log = run(release.cluster, "pytorchjob")
    assert "with codec powersgd:rank=4" in log
    assert "2 replicas are bit-identical" in log
    assert len(losses(log)) == 10
    assert losses(log) == outside()


def test_pods_of_the_job_have_their_sidecars_on_different_nodes(release):
    job = Job(release.cluster, manifest(steps=2000))
    job.await_text("step 10:")
    pods = job.pods()
    for pod in pods:
        (sidecar,) = [c for c in pod["spec"]["initContainers"] if c.get("restartPolicy")]
        assert (sidecar["name"], sidecar["restartPolicy"]) == ("thalweg-sidecar", "Always")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    print(release.cluster.kubectl("-n", "ml", "get", "pods", "-o", "wide"))
    print(job.log())
    job.delete()


def test_sidecars_that_workers_start_use_the_aggregators_of_a_release(release):
    log = run(release.cluster, "pytorchjob-no-sidecar")
    assert "2 replicas are bit-identical" in log
    assert losses(log) == outside()


def test_job_without_a_release_needs_only_its_image(cluster):
    cluster.kubectl("create", "namespace", "alone")
    log = run(cluster, "pytorchjob-no-sidecar", "alone")
    assert "2 replicas are bit-identical" in log
    assert losses(log) == outside()


def test_indexed_job_needs_neither_release_nor_operator(cluster):
    cluster.kubectl("create", "namespace", "indexed")
    log = run(cluster, "indexed-job", "indexed")
    assert "3 replicas are bit-identical" in log
    assert losses(log) == outside(nodes=3, codec="fp32")
