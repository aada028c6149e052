"""Mutual TLS and a token on a real cluster: the chart's own PyTorchJob, and certificates that are
replaced in their Secret while it runs.
"""

from __future__ import annotations

import ssl
import time

import pytest
from certificates import Authority, Secret
from release import JOB_SECONDS, Release, needs_cluster
from until import until

pytestmark = [needs_cluster, pytest.mark.alone, pytest.mark.timeout(600)]
NAMESPACE = "tls"
SERVICE = f"thalweg-aggregator.{NAMESPACE}.svc.cluster.local"
SETTINGS = (
    "tls.enabled=true,tls.aggregatorSecret=shards,tls.sidecarSecret=nodes,httpToken.secret=page",
    "pytorchJob.enabled=true,pytorchJob.resources.requests.cpu=100m",
    "pytorchJob.resources.requests.memory=512Mi",
    "pytorchJob.command={torchrun,/opt/thalweg/examples/train.py,--steps=1500}",
)


def put(release: Release, name: str, secret: Secret) -> None:
    """Creates or replaces a TLS secret."""
    files = [f"--from-file={secret.folder / file}" for file in ("tls.crt", "tls.key", "ca.crt")]
    made = ["create", "secret", "generic", name, "--type=kubernetes.io/tls", *files]
    text = release.kubectl(*made, "--dry-run=client", "--output=yaml")
    release.kubectl("apply", "--server-side", "--filename=-", text=text)


def shown(release: Release) -> set[str]:
    """Returns the certificates that the shards show at their HTTP ports."""
    addresses = [pod["status"]["podIP"] for pod in release.aggregators()]
    return {ssl.get_server_certificate((address, 7071)) for address in addresses}


def test_certificates_replaced_while_a_job_runs_reach_the_shards_and_the_job_ends(
    cluster, tmp_path
):
    authority = Authority(tmp_path / "authority")
    names = (f"*.{SERVICE}", SERVICE, "localhost")
    first = authority.issue("first", *names)
    cluster.kubectl("create", "namespace", NAMESPACE)
    release = Release(cluster, NAMESPACE)
    put(release, "shards", first)
    put(release, "nodes", authority.issue("nodes", "thalweg-sidecar"))
    release.kubectl("create", "secret", "generic", "page", "--from-literal=token=hunter2")
    release.install(*SETTINGS)
    assert shown(release) == {(first.folder / "tls.crt").read_text()}
    master = ("pod/thalweg-master-0", "--container=pytorch")
    until(
        "the job trains",
        lambda: "step 10:" in release.try_kubectl("logs", *master),
        JOB_SECONDS,
        lambda: release.try_kubectl("describe", "pods"),
    )

    start = time.monotonic()
    second = authority.issue("second", *names)
    put(release, "shards", second)
    new = {(second.folder / "tls.crt").read_text()}
    until("all shards show the new certificate", lambda: shown(release) == new, 150)
    print(f"\ncertificate replaced: shown after {time.monotonic() - start:.0f} s")
    until(
        "the job has succeeded",
        lambda: "2 replicas are bit-identical" in release.try_kubectl("logs", *master),
        JOB_SECONDS,
        lambda: release.try_kubectl("logs", *master),
    )
    assert "Phase:          Succeeded" in release.helm("test", "thalweg")
    release.helm("uninstall", "thalweg", "--wait")
