"""Measures the Google Benchmark programs of a build."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg._settings._config import ConfigError
from thalweg_bench.case import Case, Outcome
from thalweg_bench.options import Programs
from thalweg_bench.programs import find_programs
from thalweg_bench.rows import BenchError, Row, make_row, markdown, say

_MIN_SECONDS = 0.02  # of each repetition
_DEADLINE = 180.0  # of one program
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class MicroCase(Case):
    """the Google Benchmark programs *_bench of a build"""

    dir: Programs = Path("build/release")

    def check(self) -> None:
        if not programs_in(self.dir):
            raise ConfigError(
                f"there is no program *_bench in {self.dir}: build first, or give --dir"
            )

    def run(self) -> Outcome:
        rows: list[Row] = []
        programs = programs_in(self.dir)
        for number, program in enumerate(programs, 1):
            say(f"{program.name} ({number}/{len(programs)})")
            rows += parse(program.name, _run_program(program, self.repeats))
        return Outcome(rows, text=table(rows))


def programs_in(folder: Path) -> list[Path]:
    """Returns the programs below `folder`; those that need a GPU, gpu_…_bench, are not Google's."""
    found = find_programs(folder, "*_bench")
    return [path for path in found if not path.name.startswith("gpu_")]


def table(rows: Sequence[Row]) -> str:
    heads = ("benchmark", "bytes", "median µs", "min", "max", "GB/s")
    lines = [
        (
            row.case,
            str(row.bytes) if row.bytes else "-",
            *(f"{seconds * 1e6:.3f}" for seconds in (row.median_s, row.min_s, row.max_s)),
            f"{row.bytes / row.median_s / 1e9:.2f}" if row.bytes else "-",
        )
        for row in rows
    ]
    return markdown(heads, lines, left=1)


def parse(program: str, report: str) -> list[Row]:
    """Returns rows from Google Benchmark's JSON: one for each benchmark, over its repetitions."""
    try:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for run in json.loads(report)["benchmarks"]:
            if run.get("error_occurred"):
                raise BenchError(f"{program}: {run['name']} failed: {run.get('error_message')}")
            if run["run_type"] == "iteration":
                by_name.setdefault(run["run_name"], []).append(run)
        return [_row_of(program, name, of_name) for name, of_name in by_name.items()]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{program} did not report what Google Benchmark reports: {error!r}"
        ) from error


def _row_of(program: str, name: str, runs: Sequence[dict[str, Any]]) -> Row:
    """Makes a row from the clock that the benchmark uses, as its bytes per second are."""
    clock = "real_time" if name.endswith("/real_time") else "cpu_time"
    seconds = [run[clock] * _UNITS[run["time_unit"]] for run in runs]
    size = round(runs[0].get("bytes_per_second", 0.0) * seconds[0])
    system = "memcpy" if name.startswith("BM_Memcpy") else "thalweg"
    return make_row(f"{program}/{name}", system, size, seconds, None)


def _run_program(program: Path, repetitions: int) -> str:
    argv = [
        str(program.resolve()),
        "--benchmark_format=json",
        f"--benchmark_repetitions={repetitions}",
        f"--benchmark_min_time={_MIN_SECONDS}",
    ]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{program.name} did not end within {_DEADLINE:g} s") from None
    if result.returncode != 0:
        raise BenchError(f"{program.name} ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout
