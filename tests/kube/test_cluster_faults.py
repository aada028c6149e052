"""Tests what docs/faults.md says of lost pods and nodes, on a cluster: `make test-kube`."""

from __future__ import annotations

import re
import threading
import time

import pytest
from cluster import needs_nodes
from kube_jobs import STEPS, losses, outside
from timing import note
from waiting import pass_time, until

BACK_OFF = 10.0  # of a kubelet, before it starts a container again that has ended twice

pytestmark = needs_nodes(3)


@pytest.fixture
def endless(start):
    """A job that only a fault ends."""
    return start(steps=1_000_000)


def assert_trains_as_outside(job):
    assert job.await_end() == "Succeeded", job.describe()
    assert "2 replicas are bit-identical" in job.log()
    assert losses(job.log()) == outside(steps=STEPS)


def assert_fails_with(reason, job, since):
    """Asserts that the first worker's log has the reason, and that the job has failed then."""
    until(reason, lambda: re.search(reason, job.log()), 90, job.describe)
    said = time.monotonic()
    assert job.await_end() == "Failed"
    note(f"  reason '{reason}': {said - since:.1f} s; job failed", time.monotonic() - since)


def test_aggregator_that_crashes_twice_only_makes_the_job_longer(release, start):
    job = start()
    for crash in (1, 2):
        killed = release.kill(1)
        release.await_return(1, restarts=crash, seconds=60)
        note(f"aggregator killed, crash {crash}: ready again", time.monotonic() - killed)
    assert time.monotonic() - killed > BACK_OFF
    assert_trains_as_outside(job)


def test_aggregator_whose_pod_is_lost_comes_back_at_another_address(release, start):
    job = start()
    before = release.aggregators()[0]
    now = ["--force", "--grace-period=0"]
    release.cluster.kubectl("delete", "pod", "thalweg-aggregator-0", *release.where, *now)
    killed = time.monotonic()
    release.await_next(0, before["metadata"]["uid"])
    note("aggregator's pod deleted by force: ready again", time.monotonic() - killed)
    assert release.aggregators()[0]["status"]["podIP"] != before["status"]["podIP"]
    assert_trains_as_outside(job)


def test_worker_that_takes_too_much_memory_fails_the_job_by_name(release, endless):
    worker = endless.pods()[1]["metadata"]["name"]
    # Nobody has this memory but the container, so the kernel ends its largest process.
    fill = ["dd", "if=/dev/zero", "of=/dev/shm/full", "bs=1M", "count=3000"]
    argv = ["kubectl", "exec", *release.where, worker, "-c", "pytorch", "--", *fill]
    began = time.monotonic()
    threading.Thread(target=release.cluster.run, args=argv, kwargs={"seconds": 60}).start()
    assert_fails_with("rank 1", endless, began)


def test_node_without_a_network_for_five_seconds_is_waited_for(cuttable, release, start):
    job = start()
    node = release.cluster.node_of(job.pods()[1])
    with node.cut_off():
        pass_time(5)
        said = losses(job.log())
    began = time.monotonic()
    until("the next loss", lambda: losses(job.log()) != said, 60, job.describe)
    note("node cut off for 5 s: the next loss after its return", time.monotonic() - began)
    assert_trains_as_outside(job)


def test_node_without_a_network_fails_the_job_on_both_sides(cuttable, release, endless):
    began = time.monotonic()
    with release.cluster.node_of(endless.pods()[1]).cut_off():
        say = "RuntimeError: thalweg.*"
        said = until("a reason", lambda: re.search(say, endless.log()), 90, endless.describe)
        note(f"node cut off: the other node's worker says: {said[0]}", time.monotonic() - began)
    until("nodes ready", release.cluster.is_ready, 90)
    assert endless.await_end() == "Failed"
