"""Starts a launcher once for each of two nodes, as its users do on two machines, here on one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import DEADLINE, environment, servers
from ports import free_port

NODES = 2


def torchrun(node: int, port: int, *options: str) -> list[str]:
    """Returns the command of a node with one worker; options follow, and then the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
    command += ["--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    return [*command, "--master-port", str(port), *options]


def torchrun_restarting(node: int, port: int, restarts: int) -> list[str]:
    """Returns the same for a job whose attempts have a store each: environment STORES."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)]
    command += ["--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarting"]
    return [*command, "--max-restarts", str(restarts)]


STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def accelerate(node: int, port: int) -> list[str]:
    """Returns the command of Accelerate's launcher, which runs torchrun's, also without GPUs."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_machines", str(NODES), "--num_processes", str(NODES)]
    command += ["--machine_rank", str(node), "--main_process_ip", "127.0.0.1"]
    command += ["--main_process_port", str(port), "--mixed_precision", "no"]
    return [*command, "--dynamo_backend", "no"]


def run(
    command: Callable[[int, int], list[str]],
    arguments: list[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    seconds: float = 2 * DEADLINE,
) -> str:
    """Does what attempt() does. All must succeed; returns their outputs."""
    codes, output = attempt(command, arguments, folder, env, seconds=seconds)
    assert codes == [0] * NODES, output
    return output


def attempt(
    command: Callable[[int, int], list[str]],
    arguments: list[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    seconds: float = 2 * DEADLINE,
) -> tuple[list[int], str]:
    """Runs `command`, of a node and a port, with the arguments on each node and in `folder`. When
    one fails, the others are ended. Returns their exit codes and outputs.

    Each node has a sidecar, which makes it one; as on several machines, it hosts a shard.
    """
    port = free_port()
    with servers() as cluster:
        started = []
        for node in range(NODES):
            sidecar = cluster.add_sidecar("--shard-listen", "127.0.0.1:0")
            variables = environment(cluster.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
            variables |= {**env, "THALWEG_SIDECAR": sidecar.address}
            with (folder / f"node{node}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command(node, port), *arguments],
                    env=variables,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            started.append(process)
        codes = _await(started, seconds)
        for left in cluster.folder.glob("torch*_*"):  # torchelastic's and Inductor's
            shutil.rmtree(left)
        for file in cluster.folder.glob("pytorch-errorfile-*"):  # of spawn
            file.unlink()
        logs = [(folder / f"node{n}.log").read_text("utf-8", "replace") for n in range(NODES)]
        return codes, "\n".join(logs)


def _await(started: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    def end_all() -> None:
        for process in started:
            process.terminate()  # launchers end their workers then

    def wait(process: subprocess.Popen[bytes]) -> int:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end_all()
            process.wait()
            raise
        if code != 0:
            end_all()
        return code

    with ThreadPoolExecutor(len(started)) as pool:
        return list(pool.map(wait, started))
