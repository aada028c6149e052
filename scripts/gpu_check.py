"""Checks a bundle made by scripts/gpu_bundle on a machine with a GPU, and writes one JSON.

Runs every test of the bundle, the benchmarks, and where torch is installed its counterparts and,
with the bundle's wheel, training; the heaviest kernels under ncu, then the tests again under
compute-sanitizer, where these tools exist. Needs only Python 3.10 and a driver. Exits 0 only if
there was a GPU and everything that could run has passed, 1 if something failed, 2 if nothing has,
but the time was up before all had begun: run what is left with --parts. The JSON says whether it is
fast enough.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_results import cases, rows_of
from gpu_targets import against_torch, targets
from gpu_training import run_training

# Each program gets at most this many seconds, so that one that hangs leaves time for the others.
LIMIT = {"test": 90, "bench": 90, "torch": 90, "training": 180, "ncu": 60, "sanitizer": 180}
TOOLKIT = "/usr/local/cuda/bin"  # if PATH does not have it
# Races and barriers concern only kernels, all of which this program has.
SANITIZERS = ("memcheck", "racecheck", "synccheck")
KERNELS = "gpu_kernels_test"
# Arrays of 8 GiB show a sanitizer nothing that small ones do not.
NOT_SANITIZED = "--gtest_filter=-*Beyond32Bits*"
SANITIZER_EXIT = 99
PARTS = ("tests", "benchmarks", "torch", "training", "profile", "sanitizers")
NOT_STARTED = "the time was up"
# The profile covers one launch of each of the three passes over a large model's gradients, after
# the warm-ups.
PROFILED = ("gpu_powersgd_bench", "bert-large rank 4 round")
NCU = (
    *("--clock-control", "none"),  # to lock clocks is a right that containers lack
    *("--kernel-name-base", "demangled"),
    *("--kernel-name", "regex:(Project|Transposed|Reconstruct)Kernel"),
    *("--launch-skip", "9", "--launch-count", "3", "--kill", "yes"),
    *("--section", "SpeedOfLight", "--section", "MemoryWorkloadAnalysis"),
    *("--section", "LaunchStats", "--section", "Occupancy", "--section", "WarpStateStats"),
)


class Bundle:
    """The programs of a bundle, run with its libraries until a common deadline."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.deadline = time.monotonic() + seconds
        # The driver may be found through what is there.
        paths = [str(folder / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        self.env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
        # Python's own libraries may have the same names.
        self.env_of = {"torch": dict(os.environ), "training": dict(os.environ)}

    @property
    def is_late(self) -> bool:
        """Whether nothing more is to begin."""
        return time.monotonic() >= self.deadline

    @property
    def wheel(self) -> Path | None:
        return next(iter(self.folder.glob("thalweg-*.whl")), None)

    def programs(self, suffix: str) -> list[Path]:
        return sorted((self.folder / "bin").glob(f"gpu_*_{suffix}"))

    def run(self, command: list[str], kind: str) -> tuple[int, str, str]:
        """Returns exit status, output and errors; -1 when it took too long."""
        left = min(LIMIT[kind], self.deadline - time.monotonic())
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self.env_of.get(kind, self.env),
            start_new_session=True,
        ) as program:
            try:
                output, errors = program.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                # The program's workers are killed too; otherwise they would continue to use the
                # GPU.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                output, errors = program.communicate()
                return -1, output, f"{errors}\nstopped after {left:.0f} s"
        return program.returncode, output, errors


def installed(name: str) -> str | None:
    """Returns the path of a program of CUDA's toolkit."""
    return shutil.which(name) or shutil.which(name, path=TOOLKIT)


def machine() -> dict[str, str]:
    query = "name,driver_version,memory.total"
    if shutil.which("nvidia-smi") is None:
        return {"nvidia-smi": "not installed"}
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return {"nvidia-smi": "said nothing for 60 s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"nvidia-smi": (done.stdout + done.stderr).strip()}
    return dict(zip(query.split(","), lines[0].split(", "), strict=False))


def unless_late(
    bundle: Bundle, run: Callable[..., dict[str, Any]], *args: object
) -> dict[str, Any]:
    return {"not started": NOT_STARTED} if bundle.is_late else run(bundle, *args)


def run_test(bundle: Bundle, program: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status, output, errors = bundle.run([str(program), f"--gtest_output=xml:{report}"], "test")
        result: dict[str, Any] = {"exit": status}
        if report.exists():
            result |= cases(report)
        else:
            result["output"] = (output + errors)[-4000:]
    result["ok"] = status == 0 and not result.get("skipped")
    return result


def run_sanitizers(bundle: Bundle) -> dict[str, Any]:
    sanitizer = installed("compute-sanitizer")
    if sanitizer is None:
        return {"not run": "compute-sanitizer is not installed"}
    names = [program.name for program in bundle.programs("test")]
    runs = [(tool, name) for tool in SANITIZERS for name in names if name == KERNELS]
    runs += [("memcheck", name) for name in names if name != KERNELS]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda run: unless_late(bundle, run_sanitizer, sanitizer, *run), runs)
        return {f"{tool} {name}": result for (tool, name), result in zip(runs, found, strict=True)}


def run_sanitizer(bundle: Bundle, sanitizer: str, tool: str, name: str) -> dict[str, Any]:
    # Some calls fail as tests expect; those errors are not reported.
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(SANITIZER_EXIT)]
    command += [str(bundle.folder / "bin" / name), "--gtest_brief=1", NOT_SANITIZED]
    status, output, errors = bundle.run(command, "sanitizer")
    result: dict[str, Any] = {"exit": status, "ok": status == 0}
    return result if status == 0 else {**result, "output": (output + errors)[-4000:]}


def run_bench(bundle: Bundle, program: Path) -> dict[str, Any]:
    return rows_of(*bundle.run([str(program)], "bench"))


def run_torch(bundle: Bundle) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"not run": f"torch is not installed in {sys.executable}"}
    command = [sys.executable, str(bundle.folder / "gpu_torch_bench.py")]
    return rows_of(*bundle.run(command, "torch"))


def run_ncu(bundle: Bundle) -> dict[str, Any]:
    """Returns the profiler's output. The profiler needs a right that containers often lack."""
    ncu = installed("ncu")
    if ncu is None:
        return {"not run": "ncu is not installed"}
    program, case = PROFILED
    command = [ncu, *NCU, str(bundle.folder / "bin" / program), case]
    status, output, errors = bundle.run(command, "ncu")
    return {"exit": status, "output": (output + errors)[-20000:]}


def why_no_gpu(tests: dict[str, Any]) -> str | None:
    """Returns None if there is a GPU: some program has then skipped nothing."""
    reasons = [set(test.get("skipped", {}).values()) for test in tests.values()]
    return min(set.union(*reasons)) if reasons and all(reasons) else None


def not_started(result: dict[str, Any]) -> list[str]:
    """Returns the names of what the time was up for."""
    names = []
    for part in PARTS:
        found = result.get(part, {})
        if "not started" in found:
            names.append(part)
        names += [
            name for name, one in found.items() if isinstance(one, dict) and "not started" in one
        ]
    return names


def check(bundle: Bundle, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    version = bundle.folder / "version"
    result: dict[str, Any] = {
        "version": version.read_text().strip() if version.exists() else "unknown",
        "machine": machine(),
    }
    if "tests" in parts:
        tests = {
            program.name: unless_late(bundle, run_test, program)
            for program in bundle.programs("test")
        }
        result["tests"] = tests
        reason = why_no_gpu(tests)
        if reason is not None:
            return result | {"ok": False, "error": f"nothing was checked: {reason}"}
    if "benchmarks" in parts:
        result["benchmarks"] = {
            program.name: unless_late(bundle, run_bench, program)
            for program in bundle.programs("bench")
        }
    if "torch" in parts:
        result["torch"] = unless_late(bundle, run_torch)
    if "training" in parts:
        result["training"] = unless_late(bundle, run_training)
    if "benchmarks" in parts and "torch" in parts:
        against = against_torch(result["benchmarks"], result["torch"])
        result["against torch"] = against
        steps = result.get("training", {}).get("steps", {})
        result["targets"] = targets(result["benchmarks"], against, steps)
    if "profile" in parts:
        result["profile"] = unless_late(bundle, run_ncu)
    if "sanitizers" in parts:
        result["sanitizers"] = run_sanitizers(bundle)
    ran = [part for name in PARTS for part in result.get(name, {}).values()]
    ran += [result.get("torch", {}), result.get("training", {})]
    result["ok"] = all(part.get("ok", True) for part in ran if isinstance(part, dict))
    result["not started"] = not_started(result)
    return result


def parts_of(text: str) -> list[str]:
    chosen = text.split(",")
    for part in chosen:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r}, expected {', '.join(PARTS)}")
    return chosen


def main() -> int:
    here = Path(__file__).resolve().parent
    default = here if (here / "bin").is_dir() else here.parent / "out" / "gpu-bundle"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=default, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.json"), help="default: %(default)s"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.5,
        help="for all; nothing begins after that (%(default)s)",
    )
    parser.add_argument(
        "--parts",
        type=parts_of,
        default=list(PARTS),
        metavar="PART,…",
        help=f"of {', '.join(PARTS)}; default: all",
    )
    options = parser.parse_args()
    bundle = Bundle(options.bundle, options.minutes * 60)
    if not bundle.programs("test"):
        parser.error(f"no tests in {options.bundle}/bin: make the bundle with scripts/gpu_bundle")
    begin = time.monotonic()
    result = check(bundle, options.parts)
    result["seconds"] = round(time.monotonic() - begin, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    late = result.get("not started", [])
    said = "FAILED" if not result["ok"] else "nothing failed" if late else "all passed"
    print(f"{options.out}: {said}")
    if late:
        print(f"not started, {NOT_STARTED}: {', '.join(late)} (--parts)", file=sys.stderr)
    if "error" in result:
        print(f"error: {result['error']}", file=sys.stderr)
    return 1 if not result["ok"] else 2 if late else 0


if __name__ == "__main__":
    sys.exit(main())
