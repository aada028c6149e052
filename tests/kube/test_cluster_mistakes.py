"""Tests what a cluster and the chart make of wrong settings: `make test-kube`."""

from __future__ import annotations

import json
import time

import pytest
from cluster import needs_nodes
from kube_jobs import Job, losses, manifest, outside
from timing import note
from waiting import until

QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "few"},
    "spec": {"hard": {"pods": "3"}},  # two aggregators and one pod of a job
}

pytestmark = needs_nodes(3)


@pytest.fixture
def started(release):
    """Starts a job, which the test's end deletes."""
    jobs = []

    def start(text, namespace="ml"):
        jobs.append(Job(release.cluster, text, namespace))
        return jobs[-1]

    yield start
    for job in jobs:
        job.delete()


def test_upgrade_to_an_image_that_does_not_exist_leaves_shards_and_is_rolled_back(release, started):
    """Only the last shard is tried."""
    failed = release.try_upgrade("--set", "image.tag=no-such", "--timeout", "20s")
    assert failed.returncode != 0
    states = [pod["status"]["containerStatuses"][0] for pod in release.aggregators()]
    assert states[0]["ready"]
    assert states[1]["state"]["waiting"]["reason"] in ("ErrImagePull", "ImagePullBackOff")
    began = time.monotonic()
    release.rollback()
    note("upgrade to a wrong image, rollback: all shards ready", time.monotonic() - began)
    job = started(manifest())
    assert job.await_end() == "Succeeded", job.describe()
    assert losses(job.log()) == outside()


def test_job_with_a_wrong_image_says_so_in_its_pods(started):
    job = started(manifest().replace("thalweg-sidecar:0.1.0", "thalweg-sidecar:no-such"))
    until("the reason", lambda: "ErrImagePull" in job.describe(), 60, job.describe)
    assert job.end() == ""


def test_job_in_a_namespace_without_a_release_says_what_it_lacks(release, started):
    release.cluster.kubectl("create", "namespace", "elsewhere")
    job = started(manifest(), "elsewhere")
    lacks = 'configmap "thalweg-aggregators" not found'
    until("the reason", lambda: lacks in job.describe(), 60, job.describe)


def test_job_beyond_the_quota_waits_and_trains_when_there_is_room(release, started):
    release.cluster.kubectl("apply", *release.where, "-f", "-", stdin=json.dumps(QUOTA))
    job = started(manifest())

    def is_refused():
        events = release.cluster.get("events", *release.where)["items"]
        return any("exceeded quota" in (event.get("message") or "") for event in events)

    until("the quota's refusal", is_refused, 60, job.describe)
    assert job.end() == ""
    began = time.monotonic()
    release.cluster.kubectl("delete", "resourcequota", "few", *release.where)
    assert job.await_end() == "Succeeded", job.describe()
    note("quota raised: until the job has succeeded", time.monotonic() - began)
    assert losses(job.log()) == outside()
