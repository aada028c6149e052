"""Tests a release with TLS on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

import json
import re
import time

from certificates import Authority
from cluster import needs_nodes
from kube_jobs import AIAK, STEPS, Job, losses, outside
from releases import NAMESPACE, Release
from timing import note, timed
from waiting import until

DAYS = {"before": 30, "after": 90}
EXPIRY = re.compile(
    r'^thalweg_tls_certificate_expiry_timestamp_seconds{certificate="own"} (\S+)', re.M
)
SECRETS = {
    "shards": ["*.thalweg-aggregator.ml.svc.cluster.local"],
    "nodes": ["thalweg-sidecar"],
}
TLS = ["--set", "tls.enabled=true,tls.aggregatorSecret=shards,tls.sidecarSecret=nodes"]
JOB = [
    "--set",
    "pytorchJob.enabled=true,pytorchJob.resources.requests.cpu=100m,"
    f"pytorchJob.command={{torchrun,/opt/thalweg/examples/train.py,--steps={STEPS}}}",
    "--set-json",
    f"pytorchJob.env={json.dumps([{'name': k, 'value': v} for k, v in AIAK.items()])}",
]

pytestmark = needs_nodes(3)


def make_secrets(cluster, authority, when):
    """Puts certificates that are valid for so many days into the secrets."""
    for name, hosts in SECRETS.items():
        folder = authority.issue(f"{name}-{when}", *hosts, days=DAYS[when]).folder
        files = [f"--from-file={folder / file}" for file in ("tls.crt", "tls.key", "ca.crt")]
        make = ["create", "secret", "generic", name, *files, "--dry-run=client", "-o", "json"]
        secret = cluster.kubectl(*make, "--namespace", NAMESPACE)
        cluster.kubectl("apply", "-f", "-", stdin=secret)


def lifetime(release, shard):
    """Returns for how many days the certificate that a shard uses is valid."""
    where = f"/api/v1/namespaces/ml/pods/https:thalweg-aggregator-{shard}:7071/proxy/metrics"
    found = EXPIRY.search(release.cluster.kubectl("get", "--raw", where))
    return round((float(found[1]) - time.time()) / 86400)


def test_renewed_certificates_reach_the_shards_and_the_job_does_not_notice(cluster, tmp_path):
    authority = Authority(tmp_path / "ca")
    release = Release(cluster)
    release.make_namespace()
    make_secrets(cluster, authority, "before")
    with timed("helm install --wait, TLS"):
        release.install(*TLS)
    assert "2 nodes got the right mean" in release.test()
    job = Job(cluster, release.template("pytorchjob", *TLS, *JOB))
    job.await_text("step 50:")
    make_secrets(cluster, authority, "after")
    began = time.monotonic()
    for shard in range(2):
        until("the new one", lambda s=shard: lifetime(release, s) == DAYS["after"], 120)
    note("secrets renewed, until both shards have them", time.monotonic() - began)
    assert job.await_end() == "Succeeded", job.describe()
    assert losses(job.log()) == outside(steps=STEPS)
    job.delete()
    release.uninstall()
