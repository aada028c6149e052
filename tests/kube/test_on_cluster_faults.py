"""What breaks on a cluster, and what an operator does to it: docs/faults.md says how it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from release import CODEC, Job, losses, losses_outside, needs_cluster
from until import until

pytestmark = [needs_cluster, pytest.mark.alone, pytest.mark.timeout(600)]
SCRIPT = "/opt/thalweg/examples/train.py]"


def job_of(release, steps: int, **changes: str) -> Job:
    """Starts a PyTorchJob of so many steps, and waits until it exchanges gradients."""
    steps_too = SCRIPT.replace("]", f", --steps={steps}]")
    job = Job(release, "pytorchjob.yaml", {SCRIPT: steps_too} | changes)
    release.await_rounds(job)
    return job


def told(name: str, **seconds: float) -> None:
    """Prints what docs/measurements/deploy.md states."""
    print(f"\n{name}: {json.dumps({key: round(value, 1) for key, value in seconds.items()})}")


def first_processes(pod, program: str) -> list[int]:
    """Returns the processes of a pod that run a program."""
    group = f"pod{pod['metadata']['uid']}"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().partition("\0")[0]
            if command.endswith(program) and group in (process / "cgroup").read_text():
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture
def healthy(release):
    """A release whose shards are ready, before and after."""
    release.await_ready()
    yield release
    release.await_ready()


def test_aggregator_killed_midway_is_started_again_and_no_bit_changes(healthy, tmp_path):
    steps = 600
    job = job_of(healthy, steps)
    (killed,) = first_processes(healthy.aggregators()[0], "thalweg-aggregator")
    start = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    until(
        "the container is started again",
        lambda: healthy.aggregators()[0]["status"]["containerStatuses"][0]["restartCount"] == 1,
        60,
        job.describe,
    )
    back = healthy.await_ready()
    assert job.await_end() == "Succeeded", job.describe()
    log = job.first_log()
    assert "2 replicas are bit-identical" in log
    assert losses(log) == losses_outside(2, tmp_path, steps, **CODEC)
    told("aggregator killed", ready_again=time.monotonic() - start, of_these_kubelet=back)
    job.delete()


def test_aggregators_pod_deleted_midway_fails_the_job_with_the_reason(healthy):
    job = job_of(healthy, 100000)
    start = time.monotonic()
    healthy.kubectl("delete", "pod", "thalweg-aggregator-1", "--wait=false")
    assert job.await_end(60) == "Failed"
    failed = time.monotonic() - start
    log = job.first_log()
    assert "thalweg-aggregator-1" in log, log
    ready = healthy.await_ready()
    told("aggregator's pod deleted", job_failed=failed, ready_again=failed + ready)
    job.delete()
    after = Job(healthy, "pytorchjob.yaml")
    assert after.await_end() == "Succeeded", after.describe()
    after.delete()


def test_workers_pod_deleted_midway_fails_the_job_and_names_it(healthy):
    job = job_of(healthy, 100000)
    start = time.monotonic()
    healthy.kubectl("delete", "pod", "ddp-worker-0", "--grace-period=0", "--force")
    assert job.await_end(90) == "Failed"
    told("worker's pod deleted", job_failed=time.monotonic() - start)
    job.delete()


def test_scaled_release_gives_new_jobs_the_third_shard(healthy):
    start = time.monotonic()
    healthy.install("aggregator.replicas=3")
    scaled = time.monotonic() - start
    job = Job(healthy, "pytorchjob.yaml")
    assert job.await_end() == "Succeeded", job.describe()
    assert len(healthy.rounds()) == 3 and all(healthy.rounds())
    job.delete()
    start = time.monotonic()
    healthy.helm("rollback", "thalweg", "--wait")
    told("two to three shards", scaled=scaled, rolled_back=time.monotonic() - start)
    until("the third is gone", lambda: len(healthy.aggregators()) == 2, 60)


def test_drained_node_gives_its_shard_away_and_the_budget_is_honoured(healthy):
    first, second = healthy.aggregators()
    node = first["spec"]["nodeName"]
    start = time.monotonic()
    healthy.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    # While the first shard is away, the budget lets nobody evict the second one.
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": second["metadata"]["name"], "namespace": healthy.namespace},
    }
    path = f"/api/v1/namespaces/{healthy.namespace}/pods/{second['metadata']['name']}/eviction"
    with pytest.raises(AssertionError, match="disruption budget"):
        healthy.kubectl("create", f"--raw={path}", "--filename=-", text=json.dumps(eviction))
    ready = healthy.await_ready()
    assert healthy.aggregators()[0]["spec"]["nodeName"] != node
    healthy.kubectl("uncordon", node)
    told("node drained", moved_and_ready=time.monotonic() - start, of_these_waited=ready)


def test_node_cut_off_midway_fails_the_job_on_the_others(healthy, cluster):
    job = job_of(healthy, 100000)
    # The first node has the control plane; a shard's node would be another fault.
    shards = {pod["spec"]["nodeName"] for pod in healthy.aggregators()}
    places = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.pods()}
    cut = next((n for n in places.values() if n not in shards | {"node1"}), "")
    if not cut:
        job.delete()
        pytest.skip(f"no worker is alone on a node: {places}, shards on {shards}")
    start = time.monotonic()
    node = next(node for node in cluster.nodes if node.name == cut)
    node.set_link(up=False)
    try:
        assert job.await_end(120) == "Failed", job.describe()
        told("node cut off", job_failed=time.monotonic() - start)
    finally:
        node.set_link(up=True)
    until("the node is ready again", cluster.all_ready, 90)
    job.delete()


def test_image_that_is_not_there_is_told_by_the_doctor(healthy):
    job = Job(healthy, "pytorchjob.yaml", {"thalweg-sidecar:0.1.0": "thalweg-sidecar:9.9.9"})
    command = ["-m", "thalweg.cli", "doctor"]
    assert command
    until(
        "the image's absence is told",
        lambda: "ErrImage" in job.describe() or "ImagePullBackOff" in job.describe(),
        60,
        job.describe,
    )
    job.delete()
