"""Tests the chart and the manifests on a real API server, which `make test-kube` builds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_server import ROOT, ApiServer
from rendered import HELM

from thalweg.cli import _kubernetes

CHART = ROOT / "helm" / "thalweg"
REGISTRY = "image.registry=registry.test/team"
MONITORS = "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true"
EVERYTHING = f"pytorchJob.enabled=true,trainingRuntime.enabled=true,{MONITORS}"
MACHINES = f"sidecar.daemonSet.enabled=true,{MONITORS}"
SECRETS = "tls.aggregatorSecret=shards,tls.sidecarSecret=nodes"
ISSUER = "tls.certManager.enabled=true,tls.certManager.issuerRef.name=thalweg"
PROFILES = {
    "defaults": [],
    "cce-baidu": ["--values", CHART / "profiles" / "cce-baidu.yaml"],
    "cce-huawei": ["--values", CHART / "profiles" / "cce-huawei.yaml"],
    "jobs": ["--set", "pytorchJob.enabled=true,trainingRuntime.enabled=true"],
    "old-cluster": ["--set", "sidecar.daemonSet.enabled=true"],
    "tls": ["--set", f"tls.enabled=true,{SECRETS},httpToken.secret=page,{EVERYTHING}"],
    "tls-old-cluster": ["--set", f"tls.enabled=true,{SECRETS},httpToken.secret=page,{MACHINES}"],
    "cert-manager": ["--set", f"tls.enabled=true,{ISSUER},{EVERYTHING}"],
}
# NAME=FILE…: the operators' own definitions of jobs and monitors.
CRDS = dict(pair.split("=", 1) for pair in os.environ.get("THALWEG_KUBE_CRDS", "").split())
LISTS = (
    "/api/v1/namespaces/{0}/services",
    "/api/v1/namespaces/{0}/configmaps",
    "/apis/apps/v1/namespaces/{0}/statefulsets",
    "/apis/apps/v1/namespaces/{0}/daemonsets",
    "/apis/policy/v1/namespaces/{0}/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/namespaces/{0}/networkpolicies",
    "/apis/kubeflow.org/v1/namespaces/{0}/pytorchjobs",
    "/apis/monitoring.coreos.com/v1/namespaces/{0}/servicemonitors",
    "/apis/monitoring.coreos.com/v1/namespaces/{0}/podmonitors",
    "/apis/monitoring.coreos.com/v1/namespaces/{0}/prometheusrules",
    "/apis/cert-manager.io/v1/namespaces/{0}/certificates",
    "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes",
)

pytestmark = pytest.mark.skipif(not CRDS, reason="needs an API server: run `make test-kube`")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    api = ApiServer(tmp_path_factory.mktemp("kube"))
    with contextlib.ExitStack() as stack:
        stack.callback(api.stop)
        api.start()
        for name, path in CRDS.items():
            if name != "pytorchjob-1.7":
                api.define(Path(path))
        yield api


@pytest.fixture
def old_operator(server):
    """Defines PyTorchJob as training operator 1.7 does while a test runs."""
    server.define(Path(CRDS["pytorchjob-1.7"]))
    yield
    server.define(Path(CRDS["pytorchjob-1.9"]))


def helm(server: ApiServer, *arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [str(word) for word in (HELM, "--kubeconfig", server.kubeconfig, *arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def do(server: ApiServer, *arguments: object) -> str:
    result = helm(server, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def stored(server: ApiServer, namespace: str) -> dict[str, Any]:
    """Returns everything with our labels, by kind and name."""
    found = {}
    for path in LISTS:
        query = "?labelSelector=app.kubernetes.io/part-of=thalweg"
        status, answer = server.request("GET", path.format(namespace) + query)
        assert status == 200, answer
        kind = answer["kind"].removesuffix("List")
        found |= {f"{kind}/{item['metadata']['name']}": item for item in answer["items"]}
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_release_installs_upgrades_rolls_back_and_leaves_nothing(server, profile):
    where = ["--namespace", profile]
    values = [*PROFILES[profile], "--set", REGISTRY]
    do(server, "install", "t", CHART, *where, "--create-namespace", *values)
    first = stored(server, profile)
    assert first["StatefulSet/t-thalweg-aggregator"]["spec"]["replicas"] == 2

    do(server, "upgrade", "t", CHART, *where, *values, "--set", "aggregator.replicas=3")
    second = stored(server, profile)
    assert second["StatefulSet/t-thalweg-aggregator"]["spec"]["replicas"] == 3
    shards = second["ConfigMap/t-thalweg-aggregators"]["data"]["THALWEG_AGGREGATORS"]
    assert shards.count(f".{profile}.svc.cluster.local:7070") == 3
    assert second.keys() == first.keys()

    do(server, "rollback", "t", 1, *where)
    third = stored(server, profile)
    assert third["StatefulSet/t-thalweg-aggregator"]["spec"]["replicas"] == 2

    do(server, "uninstall", "t", *where)
    assert stored(server, profile) == {}


def test_release_without_aggregators_gets_them_by_an_upgrade(server):
    where = ["--namespace", "alone"]
    values = ["--set", f"{REGISTRY},{EVERYTHING},networkPolicy.jobs.enabled=true"]
    none = ["--set", "aggregator.replicas=0"]
    do(server, "install", "t", CHART, *where, "--create-namespace", *values, *none)
    first = stored(server, "alone")
    assert "StatefulSet/t-thalweg-aggregator" not in first
    policy = first["NetworkPolicy/t-thalweg-job"]["spec"]["ingress"][0]
    assert policy["ports"][0] == {"port": 7080, "endPort": 7089, "protocol": "TCP"}

    do(server, "upgrade", "t", CHART, *where, *values)
    assert "StatefulSet/t-thalweg-aggregator" in stored(server, "alone")
    do(server, "uninstall", "t", *where)
    assert stored(server, "alone") == {}


def test_what_the_chart_renders_has_no_field_that_the_server_drops(server):
    values = [*PROFILES["jobs"], *PROFILES["cce-huawei"], "--set", REGISTRY]
    do(server, "install", "kept", CHART, "--namespace", "kept", "--create-namespace", *values)
    found = stored(server, "kept")
    job = found["PyTorchJob/kept-thalweg"]["spec"]["pytorchReplicaSpecs"]["Worker"]
    runtime = found["ClusterTrainingRuntime/kept-thalweg"]["spec"]["template"]["spec"]
    node = runtime["replicatedJobs"][0]["template"]["spec"]["template"]
    for pod in (job["template"]["spec"], node["spec"]):
        assert pod["initContainers"][0]["restartPolicy"] == "Always"
        assert "startupProbe" in pod["initContainers"][0]
    assert {"ServiceMonitor/kept-thalweg-aggregator", "PodMonitor/kept-thalweg-sidecar"} <= set(
        found
    )
    do(server, "uninstall", "kept", "--namespace", "kept")


def workloads(found: dict[str, Any], name: str) -> dict[str, tuple[Any, Any]]:
    """Yields the pod's spec and the container of everything that runs a program."""
    pods = {"aggregator": found[f"StatefulSet/{name}-aggregator"]}
    if f"DaemonSet/{name}-sidecar" in found:
        pods["daemon set"] = found[f"DaemonSet/{name}-sidecar"]
    else:
        job = found[f"PyTorchJob/{name}"]["spec"]["pytorchReplicaSpecs"]
        runtime = found[f"ClusterTrainingRuntime/{name}"]["spec"]["template"]["spec"]
        pods["master"], pods["worker"] = {"spec": job["Master"]}, {"spec": job["Worker"]}
        pods["runtime"] = runtime["replicatedJobs"][0]["template"]
    specs = {key: pod["spec"]["template"]["spec"] for key, pod in pods.items()}
    native = ("master", "worker", "runtime")
    return {
        key: (spec, spec["initContainers" if key in native else "containers"][0])
        for key, spec in specs.items()
    }


@pytest.mark.parametrize(
    ("profile", "shards", "nodes"),
    [
        ("tls", "shards", "nodes"),
        ("tls-old-cluster", "shards", "nodes"),
        ("cert-manager", "kept-thalweg-aggregator-tls", "kept-thalweg-sidecar-tls"),
    ],
)
def test_every_program_gets_its_certificate_and_is_asked_over_https(server, profile, shards, nodes):
    where = ["--namespace", f"kept-{profile}"]
    values = [*PROFILES[profile], "--set", REGISTRY]
    do(server, "install", "kept", CHART, *where, "--create-namespace", *values)
    found = stored(server, f"kept-{profile}")
    for key, (spec, container) in workloads(found, "kept-thalweg").items():
        volumes = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
        expected = shards if key == "aggregator" else nodes
        assert volumes["thalweg-tls"] == {"secretName": expected, "defaultMode": 0o440}, key
        assert spec["securityContext"]["fsGroup"] == 65532, key
        mounts = {m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")}
        assert "/etc/thalweg/tls" in mounts, key
        files = {v["value"] for v in container["env"] if v["name"].startswith("THALWEG_TLS_")}
        assert files == {f"/etc/thalweg/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS", (key, probe)
    endpoints = [
        *found["ServiceMonitor/kept-thalweg-aggregator"]["spec"]["endpoints"],
        *found["PodMonitor/kept-thalweg-sidecar"]["spec"]["podMetricsEndpoints"],
    ]
    for endpoint in endpoints:
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": shards, "key": "ca.crt"}
    certificates = {name for name in found if name.startswith("Certificate/")}
    if profile != "cert-manager":
        assert certificates == set()
    else:
        assert certificates == {
            "Certificate/kept-thalweg-aggregator",
            "Certificate/kept-thalweg-sidecar",
        }
        shard = found["Certificate/kept-thalweg-aggregator"]["spec"]
        service = f"kept-thalweg-aggregator.kept-{profile}.svc.cluster.local"
        assert shard["secretName"] == shards
        assert shard["dnsNames"] == [f"*.{service}", service, "localhost"]
        addresses = found["ConfigMap/kept-thalweg-aggregators"]["data"]["THALWEG_AGGREGATORS"]
        assert all(a.split(":")[0].endswith(f".{service}") for a in addresses.split(","))
    do(server, "uninstall", "kept", *where)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy" / "jobs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_manifest_is_accepted_whole(server, path):
    for document in path.read_text(encoding="utf-8").split("\n---\n"):
        (version,) = re.findall(r"^apiVersion: (\S+)$", document, re.MULTILINE)
        (kind,) = re.findall(r"^kind: (\S+)$", document, re.MULTILINE)
        plural = "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"
        where = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/default/{plural}"
        status, answer = server.request(
            "POST", f"{where}?dryRun=All&fieldValidation=Strict", document
        )
        assert status == 201, answer


def test_chart_is_refused_beside_a_definition_that_drops_the_sidecar(server, old_operator):
    text = (ROOT / "deploy" / "jobs" / "pytorchjob.yaml").read_text(encoding="utf-8")
    _, job = server.request(
        "POST", "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs?dryRun=All", text
    )
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    # the trap: the field is accepted, and dropped
    assert "restartPolicy" not in pod["initContainers"][0]

    install = ["install", "t", CHART, "--namespace", "old", "--create-namespace", "--set", REGISTRY]
    refused = helm(server, *install)
    assert refused.returncode != 0
    assert "pytorchjobs.kubeflow.org, version v1, does not know" in refused.stderr

    do(server, *install, "--set", "sidecar.daemonSet.enabled=true")
    do(server, "uninstall", "t", "--namespace", "old")


def template(server: ApiServer, name: str, values: str) -> str:
    """Returns one template of the chart, rendered for namespace default."""
    where = ["--namespace", "default", "--show-only", f"templates/{name}.yaml"]
    where += ["--kube-version", "1.31"]
    return do(server, "template", "t", CHART, *where, "--set", f"{REGISTRY},{values}")


def hook(server: ApiServer, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the hook's script with its arguments, as its service account and with no other right."""
    text = template(server, "preflight-hook", "preflight.hook.enabled=true")
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    paths = {
        "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
        "ClusterRole": f"{rbac}/clusterroles",
        "ClusterRoleBinding": f"{rbac}/clusterrolebindings",
    }
    for document in text.split("\n---\n"):
        kind = next(line[6:] for line in document.splitlines() if line.startswith("kind: "))
        if kind in paths:
            status, answer = server.request("POST", paths[kind], document)
            assert status in (201, 409), answer
    account = f"{paths['ServiceAccount']}/t-thalweg-preflight/token"
    status, answer = server.request("POST", account, {"spec": {"expirationSeconds": 600}})
    assert status == 201, answer
    (folder / "token").write_text(answer["status"]["token"], encoding="ascii")
    (folder / "ca.crt").write_bytes(server.ca_certificate().read_bytes())
    command = [line[14:] for line in text.splitlines() if line.startswith("            - ")]
    definitions = [argument for argument in command if "=properties." in argument]
    assert len(definitions) == 2
    env = os.environ | {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "SERVICE_ACCOUNT_DIR": str(folder)}
    env["KUBERNETES_SERVICE_PORT"] = str(server.port)
    argv = [sys.executable, CHART / "files" / "preflight.py", *definitions]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


def test_hook_accepts_definitions_that_keep_the_sidecar(server, tmp_path):
    result = hook(server, tmp_path)
    assert result.returncode == 0, result.stderr


def test_hook_refuses_a_definition_that_drops_the_sidecar(server, old_operator, tmp_path):
    result = hook(server, tmp_path)
    assert result.returncode == 1
    assert "pytorchjobs.kubeflow.org, version v1, does not know" in result.stderr


def ailing_pod(server: ApiServer) -> None:
    """Creates a pod with the chart's label, a missing image, and an event that reports it."""
    name, pods = "t-thalweg-aggregator-0", "/api/v1/namespaces/default/pods"
    labels = {"app.kubernetes.io/part-of": "thalweg"}
    pod = {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "aggregator", "image": "none"}]},
    }
    status, pod = server.request("POST", pods, pod)
    assert status == 201, pod
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    container = {"name": "aggregator", "image": "none", "imageID": "", "ready": False}
    container |= {"restartCount": 0, "state": waiting}
    pod["status"] = {"phase": "Pending", "containerStatuses": [container]}
    status, answer = server.request("PUT", f"{pods}/{name}/status", pod)
    assert status == 200, answer
    event = {
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "Pod", "name": name, "namespace": "default"},
        "type": "Warning",
        "reason": "Failed",
        "message": "no such image",
    }
    status, answer = server.request("POST", "/api/v1/namespaces/default/events", event)
    assert status == 201, answer


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@pytest.fixture
def kubectl_access(server, tmp_path, monkeypatch):
    """Lets kubectl speak to the server, and not remember what definitions were before."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))


@needs_kubectl
def test_doctor_tells_what_ails_pods(server, kubectl_access):
    ailing_pod(server)
    told = [f"{finding.level} {finding.text}" for finding in _kubernetes.findings("default")]
    assert told == [
        "ok Kubernetes: v1.31.0, pods of Thalweg: 1",
        "FAIL pod t-thalweg-aggregator-0: Pending: aggregator: ImagePullBackOff",
        "ok pytorchjobs.kubeflow.org: keeps native sidecars",
        "ok clustertrainingruntimes.trainer.kubeflow.org: keeps native sidecars",
        "warn event of Pod t-thalweg-aggregator-0: Failed: no such image",
    ]


@needs_kubectl
def test_doctor_tells_a_definition_that_drops_the_sidecar(old_operator, kubectl_access):
    failures = [f.text for f in _kubernetes.findings("none") if f.level == "FAIL"]
    assert len(failures) == 1
    assert failures[0].startswith("pytorchjobs.kubeflow.org: drops restartPolicy")


def test_server_refuses_what_no_schema_sees(server):
    """Shows that these tests can fail: a StatefulSet must not miss its own pods."""
    text = template(server, "aggregator", "aggregator.replicas=2")
    sets = [d for d in text.split("\n---\n") if "kind: StatefulSet" in d]
    path = "/apis/apps/v1/namespaces/default/statefulsets?dryRun=All"
    assert server.request("POST", path, sets[0])[0] == 201
    selector = "  selector:\n    matchLabels:\n"
    assert selector in sets[0]
    wrong = sets[0].replace(selector, f"{selector}      a: b\n")
    status, answer = server.request("POST", path, wrong)
    assert status == 422, answer
    assert "does not match template" in answer["message"]
