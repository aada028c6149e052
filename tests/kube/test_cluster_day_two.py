"""Tests changes of a release on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

import json
import re
import time

from cluster import needs_nodes
from kube_jobs import STEPS, Job, losses, manifest, outside
from timing import note, timed
from waiting import until

PATIENT = ["--set", "aggregator.drainSeconds=400"]

pytestmark = needs_nodes(3)


def jobs_that_ended_well(release, pod):
    """Returns how many jobs a shard has finished well."""
    where = f"/api/v1/namespaces/ml/pods/thalweg-aggregator-{pod}:7071/proxy/metrics"
    text = release.cluster.kubectl("get", "--raw", where)
    found = re.search(r'^thalweg_shard_jobs_ended_total\{outcome="ok"\} (\d+)', text, re.M)
    return int(found[1]) if found else 0


def test_upgrade_waits_for_the_job_that_runs(release, start):
    release.upgrade(*PATIENT)
    job = start()
    with timed("helm upgrade while a job runs, until all shards are new"):
        release.upgrade(*PATIENT, "--set", "logLevel=debug")
    assert job.await_end() == "Succeeded", job.describe()
    assert losses(job.log()) == outside(steps=STEPS)


def test_upgrade_that_does_not_wait_for_long_fails_the_job_with_the_reason(release, start):
    release.upgrade("--set", "aggregator.drainSeconds=1")
    job = start(steps=1_000_000)
    began = time.monotonic()
    release.upgrade("--set", "aggregator.drainSeconds=1,logLevel=debug")
    assert job.await_end() == "Failed"
    note("upgrade with drainSeconds=1 while a job runs: job failed", time.monotonic() - began)
    assert "shutting down" in job.logs(), job.describe()


def test_next_job_uses_the_aggregators_that_a_release_has_grown_by(release):
    with timed("two to three aggregators"):
        release.upgrade("--set", "aggregator.replicas=3")
    job = Job(release.cluster, manifest())
    assert job.await_end() == "Succeeded", job.describe()
    assert losses(job.log()) == outside()
    until("the job at the third shard", lambda: jobs_that_ended_well(release, 2) == 1, 30)
    job.delete()
    with timed("helm rollback to two"):
        release.rollback()
    assert len(release.aggregators()) == 2


def test_budget_lets_one_aggregator_be_evicted_at_a_time(release):
    pods = [pod["metadata"] for pod in release.aggregators()]
    answers = [evict(release, pod["name"]) for pod in pods]
    assert answers[0].returncode == 0, answers[0].stderr
    assert "violate the pod's disruption budget" in answers[1].stderr
    with timed("an aggregator evicted, until it is ready again"):
        release.await_next(0, pods[0]["uid"])


def test_aggregator_of_a_drained_node_moves_to_another(release):
    pod = release.aggregators()[1]
    name = pod["spec"]["nodeName"]
    with timed("node drained, until its aggregator is ready elsewhere"):
        drain = ["--ignore-daemonsets", "--delete-emptydir-data", "--force"]
        release.cluster.kubectl("drain", name, *drain, "--timeout=90s")
        release.await_next(1, pod["metadata"]["uid"])
    assert release.aggregators()[1]["spec"]["nodeName"] != name
    release.cluster.kubectl("uncordon", name)


def evict(release, pod):
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "ml"},
    }
    path = f"/api/v1/namespaces/ml/pods/{pod}/eviction"
    argv = ["kubectl", "create", "--raw", path, "-f", "-"]
    return release.cluster.run(*argv, stdin=json.dumps(eviction), seconds=30)
