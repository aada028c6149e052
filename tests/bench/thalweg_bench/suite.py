"""`thalweg bench suite` runs all cases, one after the other, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from thalweg._job._processes import describe_exit, die_with_parent
from thalweg_bench import cluster, iperf, machine, micro
from thalweg_bench.lab import check_possible
from thalweg_bench.rows import BenchError, count, say
from thalweg_bench.suite_cases import CASES, MICRO, SuiteCase

MACHINE = "machine.json"
_GRACE_SECONDS = 30.0  # for a case to take its network down


@dataclass(frozen=True)
class Suite:
    out: Path
    names: tuple[str, ...]
    micro_dir: Path

    def check(self) -> None:
        """Raises LabError or ConfigError when a case cannot run here."""
        if set(self.names) != {MICRO}:
            check_possible()
            iperf.check_installed()
            cluster.check_installed()

    def run(self, start: Callable[[SuiteCase, Path], None] | None = None) -> list[str]:
        """Returns the names of failed cases; `start` runs a case, writing into a folder."""
        start = start or self._start
        self.out.mkdir(parents=True, exist_ok=True)
        cases = [CASES[name] for name in self.names]
        minutes = sum(case.seconds for case in cases) / 60
        say(f"{count(len(cases), 'case')}, about {minutes:.0f} min")
        failures = []
        for number, case in enumerate(cases, 1):
            say(f"== {case.name} ({number}/{len(cases)}), about {case.seconds} s")
            try:
                self._measure(case, start)
            except (BenchError, OSError) as error:
                say(f"== {case.name} failed: {error}")
                failures.append(case.name)
        return failures

    def _measure(self, case: SuiteCase, start: Callable[[SuiteCase, Path], None]) -> None:
        begin = time.monotonic()
        self._forget(case)
        with tempfile.TemporaryDirectory(prefix="thalweg-suite-") as folder:
            start(case, Path(folder))
            for kind in _kinds(case):
                parts = [Path(folder, f"{i}.{kind}") for i in range(len(case.commands))]
                merged = [entry for part in parts for entry in json.loads(part.read_text("utf-8"))]
                _write(self.out / f"{case.name}.{kind}", merged)
        self._remember(case, time.monotonic() - begin)

    def _forget(self, case: SuiteCase) -> None:
        """Deletes an earlier run's results, which must not pass for this one's."""
        for kind in ("json", "resources.json"):
            (self.out / f"{case.name}.{kind}").unlink(missing_ok=True)
        self._update_machine(lambda cases: cases.pop(case.name, None))

    def _remember(self, case: SuiteCase, seconds: float) -> None:
        entry = {
            "date": machine.now(),
            "seconds": round(seconds),
            "commands": case.command_lines(),
        }
        self._update_machine(lambda cases: cases.update({case.name: entry}))

    def _update_machine(self, change: Callable[[dict[str, Any]], object]) -> None:
        path = self.out / MACHINE
        known = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = dict(json.loads(path.read_text("utf-8"))["cases"])
        change(known)
        _write(path, machine.describe(self._command()) | {"cases": known})

    def _command(self) -> str:
        argv = ["thalweg", "bench", "suite", "--out", str(self.out)]
        if self.names != tuple(CASES):
            argv += ["--only", ",".join(self.names)]
        return shlex.join(argv)

    def _start(self, case: SuiteCase, folder: Path) -> None:
        for number, command in enumerate(case.commands):
            argv = [sys.executable, "-m", "thalweg", "bench", *command.split()]
            if case.name == MICRO:
                argv += ["--dir", str(self.micro_dir)]
            options = {"json": "--json", "resources.json": "--resources"}
            for kind in _kinds(case):
                argv += [options[kind], str(folder / f"{number}.{kind}")]
            run_watched(argv, os.environ | dict(case.env), 4.0 * case.seconds + 60)


def select(only: Sequence[str], micro_dir: Path) -> tuple[str, ...]:
    """Returns cases in the order of the suite; without `only` all that can run."""
    if only:
        return tuple(name for name in CASES if name in only)
    if micro.find_programs(micro_dir):
        return tuple(CASES)
    say(f"{MICRO} is left out: there is no program *_bench in {micro_dir} (see --micro-dir)")
    return tuple(name for name in CASES if name != MICRO)


def run_watched(
    argv: Sequence[str], env: dict[str, str], seconds: float, output: IO[bytes] | None = None
) -> None:
    """Raises BenchError unless the command succeeds in time. Leaves nothing running.

    `output` gets what the command prints; default: it is shown.
    """
    preexec = die_with_parent(signal.SIGTERM)
    with (
        _exiting_on_sigterm(),
        subprocess.Popen(
            argv, env=env, stdout=output, stderr=output, preexec_fn=preexec
        ) as process,
    ):
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BenchError(f"it did not end within {seconds:.0f} s") from None
        finally:
            _end(process)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code != 0:
        raise BenchError(f"it {describe_exit(code)}; its message is above")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    old = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _kinds(case: SuiteCase) -> list[str]:
    return ["json", "resources.json"] if case.resources else ["json"]


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
