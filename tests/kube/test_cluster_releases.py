"""Tests the chart's profiles on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

import pytest
from cluster import needs_nodes
from kube_jobs import Job, losses, manifest, outside
from releases import CHART, REGISTRY, Release
from timing import timed

PROFILES = CHART / "profiles"
SETTINGS = {
    "defaults": [],
    "cce-baidu": ["--values", PROFILES / "cce-baidu.yaml"],
    "cce-huawei": ["--values", PROFILES / "cce-huawei.yaml"],
    "no aggregators": ["--set", "aggregator.replicas=0"],
}

pytestmark = needs_nodes(3)


@pytest.fixture
def installed(cluster):
    """Installs a release for a test."""
    releases = []

    def install(*values):
        releases.append(Release(cluster))
        releases[0].install(*values)
        return releases[0]

    yield install
    for release in releases:
        release.uninstall()


@pytest.mark.parametrize("profile", SETTINGS)
def test_release_is_ready_on_different_nodes_and_passes_its_own_test(installed, profile):
    with timed(f"helm install --wait, {profile}"):
        release = installed(*SETTINGS[profile])
    pods = release.aggregators()
    assert len(pods) == (0 if profile == "no aggregators" else 2)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == len(pods)
    assert all(c["image"].startswith(REGISTRY) for pod in pods for c in pod["spec"]["containers"])
    with timed(f"helm test, {profile}"):
        assert "2 nodes got the right mean" in release.test()


def test_machines_sidecars_serve_a_job_of_the_operator(installed):
    with timed("helm install --wait, DaemonSet"):
        release = installed("--set", "sidecar.daemonSet.enabled=true")
    with timed("pytorchjob-node-sidecar.yaml, from kubectl create to Succeeded"):
        job = Job(release.cluster, manifest("pytorchjob-node-sidecar"))
        assert job.await_end() == "Succeeded", job.describe()
    assert "2 replicas are bit-identical" in job.log()
    assert losses(job.log()) == outside()
    job.delete()
