"""Runs the chart's commands with the real programs on this machine.

Ports become 0, the socket's folder a temporary one, the shards' names their real addresses;
everything else is as rendered.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import free_port
from chart_programs import addresses, environment, start, torchrun
from rendered import ROOT, needs_helm, pod_of, the

from thalweg import _binaries
from thalweg._job._processes import Server

pytestmark = needs_helm


@pytest.fixture
def aggregators() -> Iterator[list[Server]]:
    container = pod_of("StatefulSet")["containers"][0]
    with tempfile.TemporaryDirectory(prefix="kube-") as name, contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2):
            server = start(_binaries.AGGREGATOR, container, Path(name))
            stack.callback(server.stop, 20)
            servers.append(server)
        yield servers


def metric(server: Server, name: str) -> float:
    """Returns a metric summed over all labels."""
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert samples, f"no metric {name}"
    return sum(map(float, samples))


def test_helm_test_sends_a_round_through_every_shard(aggregators):
    container = the("Pod", "test")["spec"]["containers"][0]
    script = the("ConfigMap", "test")["data"]["round.py"]
    with tempfile.TemporaryDirectory(prefix="kube-") as name:
        folder = Path(name)
        (folder / "round.py").write_text(script, encoding="utf-8")
        program, *arguments = [a.replace("/test/", f"{name}/") for a in container["command"]]
        env = environment(container, folder, THALWEG_AGGREGATORS=addresses(aggregators))
        result = torchrun(arguments, env)
    assert program == "torchrun"
    assert result.returncode == 0, result.stderr
    assert "2 nodes got the right mean of 524288 gradients" in result.stdout
    # Gradients are in float32, from two nodes: each gradient of each node reaches one shard once.
    received = [metric(server, "thalweg_shard_received_bytes_total") for server in aggregators]
    assert all(received) and sum(received) == 2 * 4 * 524288, received


def test_helm_test_of_a_release_without_aggregators_uses_shards_of_its_sidecars():
    container = the("Pod", "test", "aggregator.replicas=0")["spec"]["containers"][0]
    with tempfile.TemporaryDirectory(prefix="kube-") as name:
        script = ROOT / "helm" / "thalweg" / "files" / "round.py"
        env = environment(container, Path(name))
        result = torchrun(["--standalone", "--nproc-per-node=2", str(script)], env)
    assert result.returncode == 0, result.stderr
    assert "2 nodes got the right mean of 524288 gradients" in result.stdout


def test_helm_test_fails_when_it_does_not_reach_the_aggregators():
    container = the("Pod", "test")["spec"]["containers"][0]
    with tempfile.TemporaryDirectory(prefix="kube-") as name:
        env = environment(container, Path(name), THALWEG_AGGREGATORS="127.0.0.1:1")
        env["THALWEG_TIMEOUT"] = "3"
        script = ROOT / "helm" / "thalweg" / "files" / "round.py"
        result = torchrun(["--standalone", "--nproc-per-node=2", str(script)], env)
    assert result.returncode != 0
    assert "127.0.0.1:1" in result.stderr


def train(pod: dict[str, Any], shards: list[Server] | None) -> list[str]:
    """Trains on two pods of a job; returns what their workers say. Checks that every shard has
    taken part: without `shards`, those that the sidecars host.
    """
    container, sidecar = pod["containers"][0], pod["initContainers"][0]
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    arguments += [f"--master-port={free_port()}", str(ROOT / "deploy" / "train.py"), "--steps=10"]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with contextlib.ExitStack() as stack:
        workers, sidecars = [], []
        for rank in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kube-")))
            env = {"THALWEG_AGGREGATORS": addresses(shards)} if shards else {}
            sidecars.append(start(_binaries.SIDECAR, sidecar, folder, **env))
            stack.callback(sidecars[-1].stop, 20)
            env = environment(container, folder, AIAK_START_COMPRESS_ITER="5")
            env["THALWEG_SIDECAR"] = env["THALWEG_SIDECAR"].replace("/run/thalweg", str(folder))
            env["PET_NODE_RANK"] = str(rank)
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            workers.append(subprocess.Popen(command, env=env, **streams))
            stack.callback(workers[-1].kill)
        said = [worker.communicate(timeout=100)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        for server in shards or sidecars:
            assert metric(server, "thalweg_shard_rounds_total") > 0
    return said


def test_plain_script_trains_through_the_sidecars_of_two_pods(aggregators):
    said = train(pod_of("PyTorchJob"), aggregators)
    assert "with codec powersgd:rank=4" in said[0]
    assert "2 replicas are bit-identical" in said[0]


def test_plain_script_trains_without_aggregators_through_shards_of_the_sidecars():
    said = train(pod_of("PyTorchJob", settings="aggregator.replicas=0"), None)
    assert "with codec powersgd:rank=4" in said[0]
    assert "2 replicas are bit-identical" in said[0]
