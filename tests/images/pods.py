"""Runs the chart's pods and a PyTorchJob's on the built images, without a cluster.

Usage: helm template thalweg helm/thalweg … | pods.py IMAGES, in namespaces of its own
(scripts/prove_images)

Two shards; the job's two pods, each a native sidecar and a worker, with the variables that the
training operator sets; the pod of `helm test`. The job is the release's, or, where that has none,
deploy/jobs/pytorchjob.yaml. Certificates that the release asks of cert-manager are made, and its
token. Exit code 1 unless the job and the test succeed on
both shards, with the users, rights and read-only roots that the specs say, and all servers end with
0 when they are asked to.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pod import Pod
from running import Network, shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "e2e"))
from certificates import Authority  # noqa: E402

TOKEN_SECRET, TOKEN = "page", "hunter2"
NAMESPACE = "default"
JOB_SECONDS = 400.0
_MASTER_PORT = "23456"


class Cluster:
    """The rendered release, and pods that run."""

    def __init__(self, rendered: str, images: Path, folder: Path) -> None:
        self._documents = [d for d in yaml.safe_load_all(rendered) if d]
        self._images = images
        self._folder = folder
        self._network = Network(folder)
        self._configmaps = {d["metadata"]["name"]: d["data"] for d in self.all("ConfigMap")}
        self._secrets = {TOKEN_SECRET: {"token": TOKEN}} | self._certificates()
        self.pods: list[Pod] = []

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [document for document in self._documents if document["kind"] == kind]

    def the(self, kind: str) -> dict[str, Any]:
        (found,) = self.all(kind)
        return found

    def add(self, name: str, spec: dict[str, Any], *names: str, **env: str) -> Pod:
        """Adds a pod that is found by its name and by `names`, not started yet."""
        sandbox = self._network.add(name, *names)
        pod = Pod(
            name,
            spec,
            sandbox,
            self._folder,
            configmaps=self._configmaps,
            secrets=self._secrets,
            env=env,
        )
        self.pods.append(pod)
        return pod

    def start(self, pod: Pod) -> None:
        pod.start(self._images, self._network)

    def close(self) -> None:
        for pod in reversed(self.pods):
            pod.stop()
            pod.remove()
        self._network.stop()

    def _certificates(self) -> dict[str, dict[str, str]]:
        """Makes what cert-manager would put into secrets."""
        authority = Authority(self._folder / "authority")
        made = [authority.fulfil(certificate) for certificate in self.all("Certificate")]
        return {
            secret.folder.name: {
                file.name: file.read_text(encoding="ascii") for file in secret.folder.iterdir()
            }
            for secret in made
        }


def shards(cluster: Cluster) -> list[Pod]:
    """Starts the StatefulSet's pods and waits until they are ready."""
    workload = cluster.the("StatefulSet")
    name, spec = workload["metadata"]["name"], workload["spec"]
    domain = f"{spec['serviceName']}.{NAMESPACE}.svc.cluster.local"
    pods = []
    for number in range(spec["replicas"]):
        pod_name = f"{name}-{number}"
        pods.append(cluster.add(pod_name, spec["template"]["spec"], f"{pod_name}.{domain}"))
        cluster.start(pods[-1])
    for pod in pods:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            pod.await_probe(pod.spec["containers"][0], kind)
    return pods


def job(cluster: Cluster) -> list[Pod]:
    """Returns the pods of the PyTorchJob as training operator 1.9 makes them."""
    text = (ROOT / "deploy" / "jobs" / "pytorchjob.yaml").read_text(encoding="utf-8")
    manifest = next(iter(cluster.all("PyTorchJob")), yaml.safe_load(text))
    name, replicas = manifest["metadata"]["name"], manifest["spec"]["pytorchReplicaSpecs"]
    templates = [
        (f"{name}-{kind.lower()}-{number}", replicas[kind]["template"]["spec"])
        for kind in ("Master", "Worker")
        for number in range(replicas[kind]["replicas"])
    ]
    master, processes = templates[0][0], manifest["spec"]["nprocPerNode"]
    pods = []
    for rank, (pod_name, spec) in enumerate(templates):
        env = {f"{prefix}MASTER_ADDR": master for prefix in ("", "PET_")}
        env |= {f"{prefix}MASTER_PORT": _MASTER_PORT for prefix in ("", "PET_")}
        env |= {"PYTHONUNBUFFERED": "1", "WORLD_SIZE": str(len(templates) * int(processes))}
        env |= {"RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NNODES": str(len(templates))}
        pods.append(cluster.add(pod_name, spec, PET_NPROC_PER_NODE=processes, **env))
    for pod in pods:
        cluster.start(pod)
    return pods


def check_rights(pod: Pod) -> None:
    """Checks that running programs have only the rights that their spec gives them."""
    for container in [*pod.spec.get("initContainers", ()), *pod.spec["containers"]]:
        running, name = pod.running[container["name"]], f"{pod.name}/{container['name']}"
        running.await_user("65532")
        assert running.status("CapEff").strip("0") == "", name
        if "securityContext" in container:
            assert running.status("CapBnd").strip("0") == "", name
            assert running.status("NoNewPrivs") == "1", name
            assert not running.execute(["touch", "/root-is-read-only"]), name


def check(cluster: Cluster) -> None:
    """Checks the cluster. Raises AssertionError."""
    aggregators = shards(cluster)
    pods = job(cluster)
    for pod in [*aggregators, *pods]:
        check_rights(pod)
    codes = [pod.running["pytorch"].wait(JOB_SECONDS) for pod in pods]
    output = "".join(pod.running["pytorch"].output for pod in pods)
    print(pods[0].running["pytorch"].output, flush=True)
    assert codes == [0, 0], output
    assert "with codec powersgd:rank=4" in output, output
    assert "2 replicas are bit-identical" in output, output
    for pod in pods:
        assert set(pod.stop().values()) == {0}, pod.running["thalweg-sidecar"].output
    after_job = [rounds(pod) for pod in aggregators]
    assert all(after_job), after_job

    test = cluster.add("helm-test", cluster.the("Pod")["spec"])
    cluster.start(test)
    check_rights(test)
    assert test.running["round"].wait(JOB_SECONDS) == 0, test.running["round"].output
    print(test.running["round"].output, flush=True)
    after_test = [rounds(pod) for pod in aggregators]
    print(f"==> rounds of the shards: {after_job}, with the test {after_test}", flush=True)
    assert all(a > b for a, b in zip(after_test, after_job, strict=True))
    for pod in aggregators:
        assert set(pod.stop().values()) == {0}, pod.running["aggregator"].output


def rounds(pod: Pod) -> float:
    """Returns the rounds, asked for as the pod's probes do, always with the token."""
    scheme = pod.spec["containers"][0]["livenessProbe"]["httpGet"].get("scheme", "HTTP").lower()
    return shard(f"{pod.sandbox.address}:7071", scheme, TOKEN)["rounds"]


def main() -> None:
    (images,) = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="pods-"))
    cluster = Cluster(sys.stdin.read(), Path(images).resolve(), folder)
    try:
        check(cluster)
    finally:
        cluster.close()
        subprocess.run(["rm", "-rf", folder], check=True)
    print("the chart's pods and the job's: run")


if __name__ == "__main__":
    main()
