"""Runs torch's own tests of fully_shard() on the CPU over several back ends, and counts them.

    git clone --depth 1 --branch v2.11.0 --filter=blob:none --sparse \\
        https://github.com/pytorch/pytorch && cd pytorch
    git sparse-checkout set test/distributed/_composable/fsdp
    python tests/c10d/fsdp2.py pytorch/test/distributed/_composable/fsdp

Exits with 1 if a test has failed over the last back end and passed over the first, and with 2 if
the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import conformance
import fsdp2_suite
from conformance import FAILED, PASSED, SKIPPED, Outcome

# Files that are not run, by part of their name, and why.
LEFT_OUT = {
    "compile": "compiles for GPUs",
    "memory": "measures a GPU's memory",
    "overlap": "measures the streams of a GPU",
}
_COUNTED = (PASSED, SKIPPED, FAILED)


@dataclass(frozen=True)
class Test:
    """A test of a file, by its class and name."""

    file: str
    case: type[unittest.TestCase]
    name: str

    def __str__(self) -> str:
        return f"{self.file}: {self.case.__name__}.{self.name}"


class Results:
    """What became of the tests, by back end and test, and of files without any."""

    def __init__(self, backends: Sequence[str]) -> None:
        self.backends = backends
        self._outcomes: dict[str, dict[str, Outcome]] = {backend: {} for backend in backends}
        self._left_out: dict[str, str] = {}

    def add(self, backend: str, test: Test, outcome: Outcome) -> None:
        self._outcomes[backend][str(test)] = outcome

    def leave_out(self, file: str, reason: str) -> None:
        self._left_out[file] = reason

    def worse(self) -> list[str]:
        """Returns the tests that failed over the last back end and passed over the first."""
        first, last = (self._outcomes[self.backends[index]] for index in (0, -1))
        return [
            name
            for name, outcome in last.items()
            if outcome.outcome == FAILED and first[name].outcome == PASSED
        ]

    def write(self, path: Path | None) -> None:
        """Writes all there is so far as JSON; None: nowhere."""
        if path is None:
            return
        found = {
            backend: {name: asdict(outcome) for name, outcome in outcomes.items()}
            for backend, outcomes in self._outcomes.items()
        }
        path.write_text(json.dumps({"left out": self._left_out, **found}, indent=1))

    def __str__(self) -> str:
        """Returns a table of counts, why files are left out, and all reasons and errors."""
        files = sorted({name.partition(":")[0] for name in self._outcomes[self.backends[0]]})
        heads = " | ".join(f"{backend}: {' / '.join(_COUNTED)}" for backend in self.backends)
        lines = [f"| file | {heads} |", "|---" * (1 + len(self.backends)) + "|"]
        for file in [*files, ""]:
            counts = " | ".join(self._counts(backend, file) for backend in self.backends)
            lines.append(f"| {file or 'all'} | {counts} |")
        lines += [f"left out {file}: {reason}" for file, reason in self._left_out.items()]
        for backend, outcomes in self._outcomes.items():
            lines += ["", f"{backend}:", *_reasons(outcomes)]
        return "\n".join(lines)

    def _counts(self, backend: str, file: str) -> str:
        counts = Counter(
            outcome.outcome
            for name, outcome in self._outcomes[backend].items()
            if name.startswith(f"{file}:") or not file
        )
        return " / ".join(str(counts[one]) for one in _COUNTED)


def _reasons(outcomes: dict[str, Outcome]) -> Iterator[str]:
    skipped = Counter(each.detail for each in outcomes.values() if each.outcome == SKIPPED)
    for reason, count in skipped.most_common():
        yield f"  {SKIPPED} {count}: {reason}"
    for name, each in outcomes.items():
        if each.outcome == FAILED:
            yield f"  {FAILED} {name}: {each.detail}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    fsdp2_suite.install(options.world_size, options.timeout)
    results = Results(options.backend)
    for test in _tests(options, results):
        for backend in options.backend:
            outcome = run(test, backend, options.timeout)
            results.add(backend, test, outcome)
            line = f"{outcome.outcome:8}{outcome.seconds:6.1f} s  {backend}  {test}"
            print(line, outcome.detail, flush=True)
            results.write(options.json)
    results.write(options.json)
    print(f"\n{options.world_size} workers:\n{results}")
    worse = results.worse()
    if worse:
        print(f"\nfailed over {options.backend[-1]} and passed over {options.backend[0]}:")
        print("\n".join(f"  {name}" for name in worse))
    return 1 if worse else 0


def run(test: Test, backend: str, seconds: float) -> Outcome:
    """Runs a test over a back end, unless that has no part in it."""
    reason = fsdp2_suite.why_not(test.case)
    if reason:
        return Outcome(test.name, SKIPPED, reason, 0.0, "")
    fsdp2_suite.use(backend)
    return conformance.run(test.case, test.name, seconds)


def _tests(options: argparse.Namespace, results: Results) -> Iterator[Test]:
    for path in sorted(options.tests.glob("test_fully_shard_*.py")):
        file = path.stem.removeprefix("test_fully_shard_")
        why = next((reason for part, reason in LEFT_OUT.items() if part in file), "")
        try:
            cases = [] if why else fsdp2_suite.load(path)
        except Exception as error:  # noqa: BLE001 - whatever the file does when it is loaded
            cases, why = [], f"it cannot be loaded: {type(error).__name__}: {error}"
        if why:
            results.leave_out(file, why)
        for case in cases:
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                test = Test(file, case, name)
                if re.search(options.only, str(test)):
                    yield test


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fsdp2.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", type=Path, metavar="FOLDER", help="has test_fully_shard_*.py")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["gloo", "thalweg"],
        metavar="NAME",
        help="over which each test runs (default: gloo thalweg)",
    )
    parser.add_argument(
        "--world-size", type=int, default=8, metavar="N", help="workers at most (default: 8)"
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help='regex found in "file: Class.test"'
    )
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="of a test (default: 300)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="gets the outcome of every test")
    options = parser.parse_args(argv)
    if not next(options.tests.glob("test_fully_shard_*.py"), None):
        parser.error(f"{options.tests} has no test_fully_shard_*.py")
    return options


if __name__ == "__main__":
    sys.exit(main())
