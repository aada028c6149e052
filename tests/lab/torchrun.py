"""Runs torchrun on several hosts for tests: run(), or `torchrun.py FILE PLAN`, both as JSON.

Each host is a network namespace with a host name of its own, node0, node1 and so on, which all of
them can resolve. It is a separate program because hosts are started from a process without other
threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from leftovers import abandoned, shared_memory
from waiting import settled

from thalweg_bench.lab import INTERFACE, Lab

PORT = 29400
STATIC = ["--master-addr", "node0", "--master-port", str(PORT)]
# With it every attempt has a store of its own. Torch shares one otherwise, in which Gloo finds
# addresses of the attempt before: without Thalweg as well, restarted jobs then fail or hang.
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_SCRIPT = Path(__file__).with_name("exact_training.py")
_LEAVING_SECONDS = 15
_LINES = 15  # of a host, in a test's message


def run(
    folder: Path,
    env: dict[str, str],
    *,
    hosts: int = 3,
    script: Path = _SCRIPT,
    options: list[str] = STATIC,
    env_of: list[dict[str, str]] | None = None,
    dropped: dict[str, int] | None = None,
    contained: bool = False,
    seconds: float = 80,
) -> dict[str, Any]:
    """Returns "hosts", each one's exit code and output, and "left", what they have left behind.

    The code of a host that does not end within `seconds` is null.

    `env` is added to the environment of all hosts, `env_of` to that of each. `options` are those of
    torchrun, and `dropped` are the TCP ports at which a host drops what it receives. A `contained`
    host ends with torchrun, as a container does, and takes along every process that is left.
    """
    out = folder / "ended.json"
    plan = {"env": env, "hosts": hosts, "script": str(script), "options": options}
    plan |= {"env_of": env_of or [{}] * hosts, "dropped": dropped or {}, "contained": contained}
    plan["seconds"] = seconds
    argv = [sys.executable, __file__, str(out), json.dumps(plan)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 30)
    assert result.returncode == 0, result.stderr
    ended: dict[str, Any] = json.loads(out.read_text())
    return ended


def outputs_of(ended: dict[str, Any]) -> str:
    """Returns what all hosts of run()'s result have said."""
    return "\n".join(host["output"] for host in ended["hosts"])


def ending(ended: dict[str, Any]) -> str:
    """Returns what a failed test says of run()'s result: exit codes, and each host's last lines.

    What torchrun itself says of a worker that failed is left out: it hides what the worker said.
    """
    codes = [host["code"] for host in ended["hosts"]]
    said = [f"exit codes {codes} (None: it did not end in time), left behind: {ended['left']}"]
    for number, host in enumerate(ended["hosts"]):
        before, _, last = host["output"].rpartition("\nTraceback (most recent call last):\n")
        output = before if "ChildFailedError" in last else host["output"]
        said += [f"-- node{number} ends with:", *output.splitlines()[-_LINES:]]
    return "\n".join(said)


def command(plan: dict[str, Any], host: int, hosts_file: str) -> list[str]:
    """Returns the command for one host, to be run in its network namespace."""
    enter = ["unshare", "--uts", "--mount"]
    if plan["contained"]:
        enter += ["--mount-proc", "--pid", "--fork", "--kill-child"]
    enter += ["sh", "-c"]
    enter += ['hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"', "sh"]
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(plan["hosts"])]
    run += ["--nproc-per-node", "1", "--node-rank", str(host), *plan["options"], plan["script"]]
    return [*enter, f"node{host}", hosts_file, *run]


def drop(lab: Lab, name: str, port: int) -> None:
    """Makes a host drop what comes from others to a TCP port, as firewalls do.

    Rules of routing do it: they need nothing but iproute2. The rule for local addresses, which is
    the first one otherwise, goes behind ours.
    """
    ours = f"pref 1 dev {INTERFACE} ipproto tcp dport {port} blackhole"
    for change in ("add pref 2 lookup local", "del pref 0", f"add {ours}"):
        lab.run(name, ["ip", "rule", *change.split()], check=True)


def left_behind(lab: Lab, folder: str, shm: set[str]) -> list[str]:
    """Returns processes, files and shared memory that are still there when time is over."""

    def look() -> list[str]:
        left = [program for name in lab.names for program in processes(lab, name)]
        left += [path.name for path in Path(folder).glob("thalweg*")]
        return left + abandoned(shared_memory() - shm)

    return settled(look, lambda left: not left, _LEAVING_SECONDS, every=0.05)


def processes(lab: Lab, name: str) -> list[str]:
    """Returns the commands of a host's processes."""
    with lab.inside(name):
        namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns/net").stat().st_ino == namespace:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def main(out: Path, plan: dict[str, Any]) -> None:
    names = [f"node{host}" for host in range(plan["hosts"])]
    own = {n: v for n, v in os.environ.items() if not n.startswith(("THALWEG_", "AIAK_"))}
    shm = shared_memory()
    with (
        Lab(names) as lab,
        tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts_file,
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
    ):
        lines = [f"{lab.address(name)} {name}\n" for name in names]
        hosts_file.write("127.0.0.1 localhost\n" + "".join(lines))
        hosts_file.flush()
        for name, port in plan["dropped"].items():
            drop(lab, name, port)
        started = []
        for host, name in enumerate(names):
            with Path(folder, f"{name}.log").open("wb") as log:
                process = lab.popen(
                    name,
                    command(plan, host, hosts_file.name),
                    env={**own, "TMPDIR": folder, **plan["env"], **plan["env_of"][host]},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            started.append(process)
        deadline = time.monotonic() + plan["seconds"]
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        left = left_behind(lab, folder, shm)
        outputs = [Path(folder, f"{name}.log").read_text(encoding="utf-8") for name in names]
        ended = [
            {"code": process.poll(), "output": output}
            for process, output in zip(started, outputs, strict=True)
        ]
        result = {"hosts": ended, "left": left}
    out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
