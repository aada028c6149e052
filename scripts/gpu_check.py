"""Checks a bundle made by scripts/gpu_bundle on a machine with a GPU, and writes one JSON.

Runs every test of the bundle, the benchmarks, torch's counterparts where torch is installed, the
heaviest kernels under ncu, then the tests again under compute-sanitizer, where these tools exist.
Needs only Python 3.10 and a driver. Exits 0 only if there was a GPU and everything that could run
has passed; the JSON says whether it is fast enough.
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
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from gpu_targets import against_torch, targets

# Each program gets at most this many seconds, so that one that hangs leaves time for the others.
LIMIT = {"test": 90, "bench": 60, "torch": 90, "ncu": 60, "sanitizer": 90}
TOOLKIT = "/usr/local/cuda/bin"  # if PATH does not have it
# Races and barriers concern only kernels, all of which this program has.
SANITIZERS = ("memcheck", "racecheck", "synccheck")
KERNELS = "gpu_kernels_test"
SANITIZER_EXIT = 99
# The profile covers one launch of each of the three passes over a large model's gradients, after
# the warm-ups.
PROFILED = ("gpu_powersgd_bench", "bert-large rank 4 round")
NCU = (
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
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
        # Python's own libraries may have the same names.
        self.env_of = {"torch": dict(os.environ)}

    def programs(self, suffix: str) -> list[Path]:
        return sorted((self.folder / "bin").glob(f"gpu_*_{suffix}"))

    def run(self, command: list[str], kind: str) -> tuple[int, str, str]:
        """Returns exit status, output and errors; -1 when the time was up."""
        left = min(LIMIT[kind], self.deadline - time.monotonic())
        if left <= 0:
            return -1, "", "not started: the time was up"
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


def cases(report: Path) -> dict[str, Any]:
    """Reads a GoogleTest report.

    Returns how many cases passed, which failed, which were skipped and why, and recorded properties
    such as the path of gradients.
    """
    result: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for noted in ET.parse(report).iter("property"):
        result[noted.get("name", "")] = noted.get("value")
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        failure, skipped = case.find("failure"), case.find("skipped")
        if failure is not None:
            result["failed"][name] = failure.get("message", "")
        elif skipped is not None:
            # The message is the place in the source, then the reason.
            result["skipped"][name] = skipped.get("message", "").strip().splitlines()[-1]
        else:
            result["passed"] += 1
    return result


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
    results: dict[str, Any] = {}
    for tool, name in runs:
        # Some calls fail as tests expect; those errors are not reported.
        command = [sanitizer, "--tool", tool, "--report-api-errors", "no"]
        command += ["--error-exitcode", str(SANITIZER_EXIT)]
        command += [str(bundle.folder / "bin" / name), "--gtest_brief=1"]
        status, output, errors = bundle.run(command, "sanitizer")
        result: dict[str, Any] = {"exit": status, "ok": status == 0}
        if status != 0:
            result["output"] = (output + errors)[-4000:]
        results[f"{tool} {name}"] = result
    return results


def run_bench(bundle: Bundle, program: Path) -> dict[str, Any]:
    return rows_of(*bundle.run([str(program)], "bench"))


def rows_of(status: int, output: str, errors: str) -> dict[str, Any]:
    """Returns a benchmark's rows; for a failed one the rows until then, and the reason."""
    result: dict[str, Any] = {"exit": status, "ok": status == 0}
    if status == 0:
        try:
            return {**result, **json.loads(output)}
        except ValueError as error:
            errors += f"\nits output is no JSON: {error}"
    rows = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line.strip().rstrip(",")))
    rows = [row for row in rows if isinstance(row, dict) and "case" in row]
    return {**result, "ok": False, "rows": rows, "output": (output + errors)[-4000:]}


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
    return min(set.union(*reasons)) if all(reasons) else None


def check(bundle: Bundle) -> dict[str, Any]:
    version = bundle.folder / "version"
    result: dict[str, Any] = {
        "version": version.read_text().strip() if version.exists() else "unknown",
        "machine": machine(),
    }
    tests = {program.name: run_test(bundle, program) for program in bundle.programs("test")}
    result["tests"] = tests
    reason = why_no_gpu(tests)
    if reason is not None:
        result |= {"ok": False, "error": f"nothing was checked: {reason}"}
        return result
    benches = {program.name: run_bench(bundle, program) for program in bundle.programs("bench")}
    result["benchmarks"] = benches
    result["torch"] = torch = run_torch(bundle)
    result["against torch"] = against_torch(benches, torch)
    result["targets"] = targets(benches, result["against torch"])
    result["profile"] = run_ncu(bundle)
    result["sanitizers"] = run_sanitizers(bundle)
    parts = [*tests.values(), *benches.values(), torch, *result["sanitizers"].values()]
    result["ok"] = all(part.get("ok", True) for part in parts if isinstance(part, dict))
    return result


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
        "--minutes", type=float, default=7.5, help="for all; what is left then fails (%(default)s)"
    )
    options = parser.parse_args()
    bundle = Bundle(options.bundle, options.minutes * 60)
    if not bundle.programs("test"):
        parser.error(f"no tests in {options.bundle}/bin: make the bundle with scripts/gpu_bundle")
    begin = time.monotonic()
    result = check(bundle)
    result["seconds"] = round(time.monotonic() - begin, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.out}: {'all passed' if result['ok'] else 'FAILED'}")
    if "error" in result:
        print(f"error: {result['error']}", file=sys.stderr)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
