"""`thalweg bench micro` runs the Google Benchmark programs of a build."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path

from thalweg_bench.rows import BenchError, Row, say

REPETITIONS = 5
_MIN_SECONDS = 0.02  # of each repetition
_DEADLINE = 180.0  # of one program
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def find_programs(folder: Path) -> list[Path]:
    """Returns executables `*_bench` below `folder`, by name."""
    found = (
        path for path in folder.rglob("*_bench") if path.is_file() and os.access(path, os.X_OK)
    )
    return sorted(found, key=lambda path: path.name)


def run(folder: Path) -> list[Row]:
    """Runs the programs. Raises BenchError."""
    rows: list[Row] = []
    programs = find_programs(folder)
    for number, program in enumerate(programs, 1):
        say(f"{program.name} ({number}/{len(programs)})")
        rows += parse(program.name, _run_program(program))
    return rows


def parse(program: str, report: str) -> list[Row]:
    """Returns rows from Google Benchmark's JSON: one for each benchmark, over its repetitions."""
    try:
        runs = [run for run in json.loads(report)["benchmarks"] if _is_measurement(program, run)]
        by_name: dict[str, list[Mapping[str, object]]] = {}
        for run in runs:
            by_name.setdefault(str(run["run_name"]), []).append(run)
        return [_make_row(program, name, of_name) for name, of_name in by_name.items()]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{program} did not report what Google Benchmark reports: {error!r}"
        ) from error


def _is_measurement(program: str, run: Mapping[str, object]) -> bool:
    if run.get("error_occurred"):
        raise BenchError(f"{program}: {run['name']} failed: {run.get('error_message')}")
    return run["run_type"] == "iteration"


def _make_row(program: str, name: str, runs: list[Mapping[str, object]]) -> Row:
    """Makes a row from the clock that the benchmark uses, as its bytes per second are."""
    clock = "real_time" if name.endswith("/real_time") else "cpu_time"
    seconds = [float(str(run[clock])) * _UNITS[str(run["time_unit"])] for run in runs]
    rate = float(str(runs[0].get("bytes_per_second", 0.0)))
    return Row(
        case=f"{program}/{name}",
        system="memcpy" if name.startswith("BM_Memcpy") else "thalweg",
        bytes=round(rate * seconds[0]),
        median_s=statistics.median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
        bound_s=None,
    )


def _run_program(program: Path) -> str:
    argv = [
        str(program.resolve()),
        "--benchmark_format=json",
        f"--benchmark_repetitions={REPETITIONS}",
        f"--benchmark_min_time={_MIN_SECONDS}",
    ]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{program.name} did not end within {_DEADLINE:g} s") from None
    if result.returncode != 0:
        raise BenchError(f"{program.name} ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout
