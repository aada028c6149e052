"""Runs all cases, each in a process of its own, and writes a page of them."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import thalweg
from thalweg._settings._config import ConfigError
from thalweg_bench import iperf, micro, report
from thalweg_bench.case import Case, Outcome
from thalweg_bench.cluster import check_installed
from thalweg_bench.lab import check_possible
from thalweg_bench.options import Option, Programs, flag, names
from thalweg_bench.programs import run_watched
from thalweg_bench.results import (
    CHUNK_BYTES,
    MEMORY_NODES,
    NODES,
    RESNET_BYTES,
    WINDOW_CHUNKS,
    Results,
)
from thalweg_bench.rows import BenchError, say

_DEADLINE = 900.0  # of a case; the longest takes three minutes on two cores


def _lab(nodes: int, rate: str, peers: str, more: str = "", *, size: int = RESNET_BYTES) -> str:
    shards = 0 if rate == "none" else nodes
    where = f"lab --nodes {nodes} --shards {shards} --rate {rate} --bytes {size} --peers {peers}"
    return f"{where} {more}".rstrip()


_BOTH = "gloo,iperf3"
_STEP = "step --nodes 4 --shards 4 --rate 250mbit --peers"
_SIZES = ",".join(str(4096 << shift) for shift in range(0, 18, 2))
_SLOW = _lab(4, "250mbit", "iperf3", "--repeats 3 --slow-shard 10", size=12_800_000)
_SMALL_CHUNKS = f"THALWEG_CHUNK_BYTES={CHUNK_BYTES} THALWEG_WINDOW_CHUNKS={WINDOW_CHUNKS}"
# The arguments of `thalweg bench`, after variables of the environment.
CASES = {
    "allreduce-4x250mbit": _lab(4, "250mbit", _BOTH),
    "allreduce-4x500mbit": _lab(4, "500mbit", _BOTH),
    "allreduce-4x1gbit": _lab(4, "1gbit", _BOTH),
    "allreduce-4x2gbit": _lab(4, "2gbit", _BOTH),
    "allreduce-8x100mbit": _lab(8, "100mbit", _BOTH),
    "allreduce-4x2workers-250mbit": _lab(4, "250mbit", _BOTH, "--workers 2"),
    "fp16-4x1gbit": _lab(4, "1gbit", "iperf3", "--dtype fp16"),
    "local-2workers": _lab(1, "none", "gloo,memcpy", "--workers 2"),
    "local-4workers": _lab(1, "none", "gloo,memcpy", "--workers 4"),
    "step-resnet50": f"{_STEP} ddp,torch-fp16,iperf3 --model resnet50 --codec fp16",
    "step-swin-t": f"{_STEP} ddp,torch-fp16,iperf3 --model swin-t --codec fp16",
    # Plain DDP would add its 438 MB and 21 s to each of many steps without new information.
    "step-bert-base": f"{_STEP} torch-fp16,iperf3 --model bert-base --codec fp16 --repeats 3",
    "step-4x2workers-fp32": f"{_STEP} ddp,iperf3 --model resnet50 --workers 2 --repeats 3",
    "sweep-1gbit": f"lab --nodes 4 --shards 4 --rate 1gbit --bytes {_SIZES} --repeats 3",
    **{f"scale-{n}": _lab(n, "50mbit", "iperf3", size=12_000_000) for n in NODES},
    "latency": "latency --nodes 4 --shards 4 --count 1000 --peers gloo",
    "soak": "soak --nodes 2 --shards 2 --count 10000",
    "memory": f"{_SMALL_CHUNKS} {_lab(MEMORY_NODES, '500mbit', 'iperf3', '--repeats 3')}",
    "slow-shard": _SLOW,
    "slow-shard-weighted": f"{_SLOW} --weighted",
    "micro": "micro",
}


@dataclass(frozen=True, kw_only=True)
class SuiteCase(Case):
    """all cases that `make bench` measures

    Each case is a command of `thalweg bench`; --list shows them. It leaves what it prints in
    DIR/NAME.md, its rows in DIR/NAME.json, and some resources in DIR/NAME.resources.json. Cases
    measured earlier stay in DIR unless they are measured again. In the end DIR/performance.md has
    all of them, with their targets and plots.
    """

    out: Annotated[Path | None, Option(Path, "where to write; made if need be", "DIR")] = None
    list: Annotated[bool, flag("show the cases and leave")] = False
    only: Annotated[tuple[str, ...], names(CASES, "default: all")] = tuple(CASES)
    dir: Programs = Path("build/release")

    def check(self) -> None:
        if self.list:
            return
        if self.out is None:
            raise ConfigError("one of --out and --list is required")
        if "micro" in self.only and not micro.programs_in(self.dir):
            raise ConfigError(
                f"there is no program *_bench in {self.dir}: build first (make build)"
            )
        if self.only != ("micro",):
            check_possible()
            iperf.check_installed()
            check_installed()

    def run(self) -> Outcome:
        if self.list or self.out is None:
            return Outcome([], text="\n".join(f"{name}\n    {typed(name)}" for name in self.only))
        self.out.mkdir(parents=True, exist_ok=True)
        failures = []
        for name in self.only:
            say(f"== {name}: {typed(name)}")
            for path in self.out.glob(f"{name}.*"):  # an earlier run's must not pass for this one's
                path.unlink()
            try:
                self.start(name, self.out)
            except BenchError as error:
                say(f"== {name} failed: {error}")
                failures.append(name)
        report.write(self.out, Results.read(self.out, [*CASES]), describe_machine(), [*CASES])
        if failures:
            raise BenchError(f"failed: {', '.join(failures)}; all others were measured")
        return Outcome([], text=f"see {self.out / 'performance.md'}")

    def start(self, name: str, out: Path) -> None:
        """Runs a case, which writes its files. Raises BenchError."""
        words = CASES[name].split()
        env = dict(word.split("=") for word in words if word.startswith("THALWEG_"))
        words = [*words[len(env) :], "--json", str(out / f"{name}.json")]
        if words[0] in ("lab", "soak"):
            words += ["--resources", str(out / f"{name}.resources.json")]
        if words[0] == "micro":
            words += ["--dir", str(self.dir)]
        argv, begin = [sys.executable, "-m", "thalweg", "bench", *words], time.monotonic()
        with tempfile.TemporaryFile() as file:
            run_watched(argv, _DEADLINE, env=env, output=file)
            file.seek(0)
            seconds, table = time.monotonic() - begin, file.read().decode()
        how = f"`{typed(name)}`, {_now()}, {seconds:.0f} s"
        (out / f"{name}.md").write_text(f"## {name}\n\n{how}\n\n{table}", encoding="utf-8")


def typed(name: str) -> str:
    """Returns a case's command as a person would type it."""
    return re.sub("^((?:THALWEG_\\S+ )*)", r"\1thalweg bench ", CASES[name])


def describe_machine() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    kilobytes = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "date": _now(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{round(int(kilobytes[1]) / (1 << 20))} GiB" if kilobytes else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "thalweg": thalweg.__version__,
        "commit": commit(Path(thalweg.__file__).parent),
    }


def commit(folder: Path) -> str | None:
    """Returns the commit of the repository around the folder; "-dirty" when it has changes."""
    argv = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
