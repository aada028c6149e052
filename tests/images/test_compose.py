"""deploy/compose.yaml, run by podman-compose on the built images."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request

import pytest
from engine import ENV, ROOT, assert_locked, needs_images, podman

from thalweg._job._addresses import free_port

pytestmark = [
    pytest.mark.alone,
    needs_images("aggregator", "sidecar", "training"),
    pytest.mark.timeout(400),
]
COMPOSE = ROOT / ".tools" / "venv" / "bin" / "podman-compose"
FILE = ROOT / "deploy" / "compose.yaml"
PROJECT = f"thalweg-test-{os.getpid()}"
PORT = free_port()
TRAINING_SECONDS = 240.0


def compose(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs podman-compose, which finds podman's settings in the environment."""
    argv = [str(COMPOSE), "--project-name", PROJECT, "--file", str(FILE), *arguments]
    env = ENV | {"PAGE_ADDRESS": f"127.0.0.1:{PORT}"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)


def containers(*options: str) -> dict[str, str]:
    """Returns identities by service."""
    label = "com.docker.compose.service"
    chosen = ["--filter", f"label=com.docker.compose.project={PROJECT}", *options]
    listed = podman(
        "ps", "--all", *chosen, "--format", f'{{{{index .Labels "{label}"}}}} {{{{.ID}}}}'
    )
    return dict(line.split() for line in listed.splitlines())


@pytest.fixture
def project():
    started = compose("up", "--detach", "--no-build")
    assert started.returncode == 0, started.stderr
    try:
        yield containers()
    finally:
        ended = compose("down", "--volumes")
        assert ended.returncode == 0, ended.stderr


def output(container: str) -> str:
    argv = ["podman", "logs", container]
    result = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=30)
    return result.stdout + result.stderr


def page(container: str, path: str) -> bytes:
    """Returns what the page at the aggregator's published port answers."""
    address = podman("port", container, "7071")
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
        body: bytes = reply.read()
        return body


def test_compose_file_trains_two_nodes_and_shows_the_page(project):
    assert set(project) == {
        f"{kind}{n}" for kind in ("aggregator", "sidecar", "worker") for n in (0, 1)
    }
    workers = [project["worker0"], project["worker1"]]
    codes = podman("wait", *workers, seconds=TRAINING_SECONDS)
    said = output(workers[0])
    assert codes.split() == ["0", "0"], said + output(workers[1])
    assert "with codec powersgd:rank=4" in said
    assert "2 replicas are bit-identical" in said
    assert b"<html" in page(project["aggregator0"], "/")
    assert json.loads(page(project["aggregator0"], "/api/v1/shard"))["rounds"] > 0
    servers = [id for name, id in project.items() if not name.startswith("worker")]
    for server in servers:
        assert_locked(server)
        podman("healthcheck", "run", server)
    assert compose("stop").returncode == 0
    ended = podman("container", "inspect", "--format", "{{.State.ExitCode}}", *servers)
    assert ended.split() == ["0"] * 4, "\n".join(map(output, servers))


def test_compose_down_leaves_nothing():
    before = {kind: podman(kind, "ls", "--quiet") for kind in ("network", "volume")}
    assert compose("up", "--detach", "--no-build", "aggregator0", "aggregator1").returncode == 0
    assert set(containers()) == {"aggregator0", "aggregator1"}
    assert compose("down", "--volumes").returncode == 0
    assert containers() == {}
    assert {kind: podman(kind, "ls", "--quiet") for kind in ("network", "volume")} == before
