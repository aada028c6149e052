"""Tests what Prometheus sees by the chart's monitors and rules on a cluster: `make test-kube`."""

from __future__ import annotations

import time

import pytest
from cluster import needs_nodes
from releases import CHART, Release
from timing import note, timed
from waiting import until
from watching import Watch

pytestmark = needs_nodes(3)


@pytest.fixture(scope="module")
def release(cuttable, cluster):
    """The profile with monitors and rules."""
    found = Release(cluster)
    found.install("--values", CHART / "profiles" / "cce-huawei.yaml")
    yield found
    found.uninstall()


@pytest.fixture(scope="module")
def watch(release):
    """Prometheus on a node that keeps its network: that of the first aggregator."""
    with timed("Prometheus and Alertmanager ready"):
        return Watch(release.cluster, release.aggregators()[0]["spec"]["nodeName"])


@pytest.fixture
def job(start):
    """A job that trains for as long as a test."""
    return start(steps=1_000_000)


def test_monitors_find_aggregators_and_the_sidecars_of_a_job(watch, job):
    def found():
        up = watch.query('up{namespace="ml"} == 1')
        return {series["metric"]["pod"] for series in up}

    expected = {"thalweg-aggregator-0", "thalweg-aggregator-1", "ddp-master-0", "ddp-worker-0"}
    with timed("job trains, until Prometheus has scraped all four pods"):
        until("all targets", lambda: found() == expected, 90, lambda: str(found()))
    ratio = "instance:thalweg_sidecar_sent_compression:ratio_rate5m"
    until("a record", lambda: watch.query(f"{ratio} > 5"), 90, job.describe)


def test_alerts_of_a_lost_node_reach_the_alertmanager(release, watch, job):
    began = time.monotonic()
    with release.cluster.node_of(release.aggregators()[1]).cut_off():
        for alert in ("ThalwegShardDown", "ThalwegJobsFailing"):
            until(alert, lambda alert=alert: alert in watch.alerts(), 240)
            note(f"node of an aggregator cut off: {alert}", time.monotonic() - began)
    until("nodes ready", release.cluster.is_ready, 90)
    assert job.await_end() == "Failed"
    release.await_ready()
