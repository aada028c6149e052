"""Runs torch's own tests of back ends of torch.distributed on one of them.

Exits with 1 if any test has failed, and with 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import conformance_suite
import mapped_devices
import torch_harness

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_GRACE = 15  # seconds that a test has for the tracebacks of its workers, after its limit
_DIED = "the test's own process has died"
_RAISED = "exited with error code"
_UNSAID = "look at subprocess log"  # torch's reason if a worker alone knows it
_SAID = re.compile(r"skipping test \S+ for following reason: (.*)")
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout)\b.*)$", re.M)


@dataclass
class Outcome:
    """What has become of a test. `detail` is the reason, or the last line of its error."""

    name: str
    outcome: str
    detail: str
    seconds: float
    log: str  # all that a failed test and its workers have written


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    suite = conformance_suite.load(
        options.backend,
        options.world_size,
        options.timeout,
        profiled=options.profiler,
        hosts=options.hosts,
    )
    if options.cuda_on_cpu:
        mapped_devices.install(options.world_size)
    names = chosen(unittest.defaultTestLoader.getTestCaseNames(suite), options)
    outcomes = []
    for name in names:
        outcome = run(suite, name, options.timeout)
        outcomes.append(outcome)
        print(f"{outcome.outcome:8}{outcome.seconds:6.1f} s  {name}  {outcome.detail}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print(f"\n{options.backend}, world size {options.world_size}:")
    print(summary(outcomes))
    return 1 if any(each.outcome == FAILED for each in outcomes) else 0


def chosen(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Returns the names of tests that the options leave."""
    left = [name for name in names if re.search(options.only, name)]
    number, count = options.shard
    return left[number - 1 :: count][:: options.sample]


def run(suite: type[unittest.TestCase], name: str, seconds: float) -> Outcome:
    """Runs a test in a process of its own, and ends whatever it has started after its limit."""
    folder = Path(tempfile.mkdtemp(prefix="c10d-"))
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(suite, name, folder)
    pidfd = os.pidfd_open(pid)
    in_time = bool(select.select([pidfd], [], [], seconds + _GRACE)[0])
    os.close(pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    took = time.monotonic() - started
    log = (folder / "log").read_text(errors="replace")
    found = folder / "outcome"
    outcome, detail = json.loads(found.read_text()) if found.exists() else (FAILED, _DIED)
    if _UNSAID in detail:
        detail = next(iter(_SAID.findall(log)), detail)
    if not in_time:
        outcome, detail = FAILED, f"no end in {seconds:.0f} s {last_error(log)}".strip()
    elif outcome == FAILED:
        said = _RAISED in detail  # otherwise a worker has ended before torch's harness ran the test
        log, detail = log + detail, last_error(detail if said else log) or last_error(detail)
        detail = detail or _DIED
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(name, outcome, detail, round(took, 1), log if outcome == FAILED else "")


def _run_and_exit(suite: type[unittest.TestCase], name: str, folder: Path) -> None:
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        (folder / "outcome").write_text(json.dumps(_outcome(suite(name))))
    finally:
        os._exit(0)


def _outcome(case: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    case.run(result)
    for _, error in [*result.failures, *result.errors]:
        return FAILED, error
    for _, reason in result.skipped:
        return SKIPPED, reason
    if result.testsRun != 1 or not getattr(case, "started", 0):
        return FAILED, "AssertionError: no worker has been started"
    return PASSED, ""


def last_error(text: str) -> str:
    """Returns the first line of the last exception that a text tells of."""
    found = [line for line in _ERROR.findall(text) if _RAISED not in line]
    return found[-1] if found else ""


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns the counts, the reasons of the skipped tests, and the failures."""
    counts = Counter(each.outcome for each in outcomes)
    lines = [", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, SKIPPED, FAILED))]
    reasons = Counter(each.detail for each in outcomes if each.outcome == SKIPPED)
    lines += [f"  {SKIPPED} {count}: {reason}" for reason, count in reasons.most_common()]
    failures = [each for each in outcomes if each.outcome == FAILED]
    lines += [f"  {FAILED} {each.name}: {each.detail}" for each in failures]
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="conformance.py", description=__doc__)
    parser.add_argument("--backend", default="thalweg", help="its name (default: thalweg)")
    parser.add_argument(
        "--world-size", type=int, default=2, metavar="N", help="workers of each test (default: 2)"
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="tests in whose names this regex is found"
    )
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="K/N", help="the K-th of N parts of them"
    )
    parser.add_argument(
        "--sample", type=int, default=1, metavar="N", help="of those every N-th (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=100, metavar="SECONDS", help="of a test (default: 100)"
    )
    parser.add_argument(
        "--profiler", action="store_true", help="expect events in the profiler, as of gloo"
    )
    parser.add_argument(
        "--cuda-on-cpu",
        action="store_true",
        help="run tests for GPUs on the CPU; those that need a real GPU then fail on any back end",
    )
    torch_harness.add_hosts_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="gets the outcome of every test")
    return parser.parse_args(argv)


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"{text}: expected K/N with 1 <= K <= N")
    return number, count


if __name__ == "__main__":
    sys.exit(main())
