"""The servers' images in containers of a real engine, with the rights that the chart gives them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
from engine import ROOT, Container, assert_locked, image, needs_images, podman

from thalweg._job._addresses import free_port

pytestmark = [
    pytest.mark.alone,
    needs_images("aggregator", "sidecar"),
    pytest.mark.timeout(400),
]
USER = "65532:65532"


@pytest.mark.parametrize(("name", "ports"), [("aggregator", (7070, 7071)), ("sidecar", (7072,))])
def test_image_runs_its_program_as_nobody_in_particular(name, ports):
    found = image(name)
    config = found["Config"]
    assert config["User"] == USER
    assert config["Entrypoint"] == [f"/opt/thalweg/bin/thalweg-{name}"]
    assert set(config["ExposedPorts"]) == {f"{port}/tcp" for port in ports}
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert labels["title"] == f"thalweg-{name}"
    assert labels["licenses"] == "Apache-2.0"
    assert len(labels["revision"]) == 40
    # neither a compiler nor Python is there
    assert found["Size"] < 400e6


def workers(folders) -> list[subprocess.Popen[str]]:
    """Starts a worker of this machine for each node's sidecar."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("THALWEG_", "AIAK_"))}
    env |= {"AIAK_POWERSGD_COMPRESSION": "1", "AIAK_MATRIX_APPROXIMATION_RANK": "4"}
    env |= {"AIAK_START_COMPRESS_ITER": "5", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(folders)}"]
    argv += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    argv += [str(ROOT / "deploy" / "train.py"), "--steps=20"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = []
    for rank, folder in enumerate(folders):
        own = {"THALWEG_SIDECAR": f"{folder}/sidecar.sock", "PET_NODE_RANK": str(rank)}
        started.append(subprocess.Popen(argv, env=env | own, **streams))
    return started


def test_two_nodes_train_through_containers_that_end_by_sigterm(network, tmp_path):
    tmp_path.chmod(0o755)
    with contextlib.ExitStack() as stack:
        shards = []
        for _ in range(2):
            shards.append(Container("aggregator", network))
            stack.callback(shards[-1].remove)
        for shard in shards:
            shard.await_ready(7071)
        addresses = ",".join(f"{shard.address}:7070" for shard in shards)
        sidecars, folders = [], [tmp_path / "node0", tmp_path / "node1"]
        for folder in folders:
            folder.mkdir()
            os.chown(folder, 65532, 65532)
            options = [f"--volume={folder}:/run/thalweg", f"--env=THALWEG_AGGREGATORS={addresses}"]
            sidecars.append(Container("sidecar", network, *options))
            stack.callback(sidecars[-1].remove)
        for sidecar in sidecars:
            sidecar.await_ready(7072)
            assert sidecar.get(7072, "/healthz") is not None

        started = workers(folders)
        stack.callback(lambda: [worker.kill() for worker in started])
        said = [worker.communicate(timeout=300)[0] for worker in started]
        assert [worker.returncode for worker in started] == [0, 0], said
        assert "with codec powersgd:rank=4" in said[0]
        assert "2 replicas are bit-identical" in said[0]
        for shard in shards:
            assert json.loads(shard.get(7071, "/api/v1/shard") or b"")["rounds"] > 0
            assert shard.get(7071, "/") is not None  # the live page
        for server in [*sidecars, *shards]:
            assert server.stop() == 0, server.logs()


def test_container_gives_its_program_no_rights_and_no_writable_root(network):
    container = Container("aggregator", network)
    try:
        container.await_ready(7071)
        assert_locked(container.id)
        status = podman("exec", container.id, "cat", "/proc/1/status")
        assert "NoNewPrivs:\t1\n" in status
    finally:
        container.remove()
