"""Lets these tests use what the end-to-end tests share, and starts the cluster that some of them
run on.
"""

import sys
from pathlib import Path

import pytest
import timing

sys.path.append(str(Path(__file__).parents[1] / "e2e"))


def pytest_terminal_summary(terminalreporter):
    if timing.lines:
        terminalreporter.section("on the cluster")
        terminalreporter.write_line("\n".join(timing.lines))


@pytest.fixture(scope="session")
def cluster():
    """A cluster with operators. It ends with the namespaces that scripts/test_kube makes."""
    from cluster import NODES, Cluster
    from operators import install_prometheus_operator, install_training_operator

    found = Cluster(NODES)
    with timing.timed(f"{NODES} nodes ready, with all images"):
        found.start()
    with timing.timed("operators ready: PyTorchJob, Prometheus"):
        install_training_operator(found)
        install_prometheus_operator(found)
    return found


@pytest.fixture(scope="module")
def cuttable(cluster):
    """Keeps new pods away from the node of the control plane: without a network, nobody could ask
    that about the others.
    """
    name = cluster.nodes[0].name
    cluster.kubectl("cordon", name)
    yield
    cluster.kubectl("uncordon", name)


@pytest.fixture(scope="module")
def release(cluster):
    """The chart with its defaults, as the release that deploy/jobs/pytorchjob.yaml expects."""
    from releases import Release

    found = Release(cluster)
    with timing.timed("helm install --wait, defaults"):
        found.install()
    yield found
    found.uninstall()


@pytest.fixture
def start(release):
    """Starts a job, and returns when it has trained a little."""
    from kube_jobs import STEPS, Job, manifest

    jobs = []

    def started(steps=STEPS, codec=""):
        limits = "memory: 1Gi\n                limits:\n                  memory: 2Gi\n"
        text = manifest(steps=steps, codec=codec).replace("memory: 4Gi\n", limits)
        jobs.append(Job(release.cluster, text))
        jobs[-1].await_text("step 10:")
        return jobs[-1]

    yield started
    for job in jobs:
        job.delete()
