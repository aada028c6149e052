"""Runs torchrun on several hosts for test_torchrun.py: `torchrun.py FILE NAME=VALUE…`.

Each host is a network namespace with a host name of its own, which all of them can resolve. Like a
container, it ends with torchrun, and takes along every process that torchrun has left behind. The
names and values are added to the environment. FILE gets, as JSON, each host's exit code and output.

It is a separate program because hosts are started from a process without other threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from thalweg_bench.lab import Lab

HOSTS = 3
PORT = 29400
_SECONDS = 90
_SCRIPT = Path(__file__).with_name("exact_training.py")


def command(host: int, hosts_file: str) -> list[str]:
    """Returns the command for one host, to be run in its network namespace."""
    enter = ["unshare", "--uts", "--mount-proc", "--pid", "--fork", "--kill-child", "sh", "-c"]
    enter += ['hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"', "sh"]
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS)]
    run += ["--nproc-per-node", "1", "--node-rank", str(host)]
    run += ["--master-addr", "node0", "--master-port", str(PORT), str(_SCRIPT)]
    return [*enter, f"node{host}", hosts_file, *run]


def main(out: Path, settings: dict[str, str]) -> None:
    names = [f"node{host}" for host in range(HOSTS)]
    own = {n: v for n, v in os.environ.items() if not n.startswith(("THALWEG_", "AIAK_"))}
    with Lab(names) as lab, tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts_file:
        lines = [f"{lab.address(name)} {name}\n" for name in names]
        hosts_file.write("127.0.0.1 localhost\n" + "".join(lines))
        hosts_file.flush()
        started = [
            lab.popen(
                name,
                command(host, hosts_file.name),
                env={**own, **settings},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, name in enumerate(names)
        ]
        ended = []
        for process in started:
            output, _ = process.communicate(timeout=_SECONDS)
            ended.append({"code": process.returncode, "output": output})
    out.write_text(json.dumps(ended), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(setting.split("=", 1) for setting in sys.argv[2:]))
