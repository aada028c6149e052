"""Installs the C++ package, builds the example of docs/cpp.md with it, and runs it on two nodes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import DEADLINE, environment, servers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "cpp_worker"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def average(tmp_path_factory) -> Path:
    """Returns the example, which was built outside the project and knows only what is installed."""
    folder = tmp_path_factory.mktemp("cpp")
    build = ROOT / "build" / "release"
    run("cmake", "--install", build, "--component", "cpp", "--prefix", folder / "installed")
    source = shutil.copytree(EXAMPLE, folder / "source")
    # Where the kernels for GPUs are built with the wheels' nvcc, this folder is the toolkit.
    toolkit = f"-DCUDAToolkit_ROOT={build / 'cuda-toolkit'}"
    prefix = f"-DCMAKE_PREFIX_PATH={folder / 'installed'}"
    run("cmake", "-S", source, "-B", folder / "build", prefix, toolkit)
    run("cmake", "--build", folder / "build")
    return folder / "build" / "average"


@pytest.mark.timeout(900)
def test_two_workers_without_python_average_through_an_aggregator(average):
    with servers(nodes=2, shards=1) as cluster:
        workers = [
            subprocess.Popen(
                [average, cluster.folder / f"s{node}.sock", "cpp", str(node), "2"],
                env=environment(cluster.folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]
        said = [worker.communicate(timeout=DEADLINE)[0] for worker in workers]
        shard = cluster.page(cluster.aggregators[0])
    # The mean of what node 0 and node 1 give in round r: (1 + 2) * r / 2.
    assert said == ["round 1: 1.5\nround 2: 3\nround 3: 4.5\n"] * 2
    # Three rounds of four float32 from each of two nodes.
    assert "thalweg_shard_received_bytes_total 96\n" in shard


def test_a_worker_whose_sidecar_is_not_there_is_told_its_socket(average, tmp_path):
    nowhere = tmp_path / "nowhere.sock"
    failed = subprocess.run(
        [average, nowhere, "cpp", "0", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert failed.returncode == 1
    assert str(nowhere) in failed.stderr
