"""Tests jobs whose sidecars are killed on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

import re
import time

import pytest
from cluster import needs_nodes, statuses
from kube_jobs import losses, outside
from timing import note
from waiting import until

STEPS = 600  # the job must not end before the next process has been asked for its metrics

pytestmark = needs_nodes(3)


def kill_process(cluster, pod):
    """Kills the child in which the sidecar serves."""
    kill = "kill -KILL $(</proc/1/task/1/children)"
    where = ["--namespace=ml", pod["metadata"]["name"], "--container=thalweg-sidecar"]
    cluster.kubectl("exec", *where, "--", "bash", "-c", kill)


def kill_container(cluster, pod):
    """Kills the sidecar's first process; then the kubelet starts the container again."""
    cluster.kill(pod, "thalweg-sidecar")


def restart_count(cluster, pod):
    found = cluster.get("pod", "--namespace=ml", pod["metadata"]["name"])
    return next(s["restartCount"] for s in statuses(found) if s["name"] == "thalweg-sidecar")


def jobs_taken_up(cluster, pod):
    """Returns how many jobs of an earlier process have gone on in this one."""
    path = f"/api/v1/namespaces/ml/pods/{pod['metadata']['name']}:7072/proxy/metrics"
    answer = cluster.run("kubectl", "get", "--raw", path, "--request-timeout=5s", seconds=30)
    found = re.search(r"^thalweg_sidecar_taken_up_jobs_total (\d+)", answer.stdout, re.M)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(("kill", "restarts"), [(kill_process, 0), (kill_container, 1)])
def test_job_goes_on_when_a_sidecar_is_killed(kill, restarts, cluster, start):
    job = start(steps=STEPS, codec="fp16")
    pod = job.pods()[1]
    began = time.monotonic()
    kill(cluster, pod)
    until("another process", lambda: jobs_taken_up(cluster, pod), 30, job.describe)
    note(f"sidecar: {kill.__name__}, until another one has its job", time.monotonic() - began)
    until(f"restart {restarts}", lambda: restart_count(cluster, pod) == restarts, 30)
    assert job.await_end() == "Succeeded", job.describe()
    assert "2 replicas are bit-identical" in job.log()
    assert losses(job.log()) == outside(steps=STEPS, codec="fp16")
