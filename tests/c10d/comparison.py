"""Runs tests of torch over several back ends, and compares what became of them: compare()."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from conformance import FAILED, PASSED, SKIPPED, Outcome

_COUNTED = (PASSED, SKIPPED, FAILED)

Test = TypeVar("Test")


class Results:
    """What became of the tests, by back end and test, and of what is not run.

    A test's text is its name: "file: Class.test".
    """

    def __init__(self, backends: Sequence[str]) -> None:
        self.backends = backends
        self._outcomes: dict[str, dict[str, Outcome]] = {backend: {} for backend in backends}
        self._left_out: dict[str, str] = {}

    def add(self, backend: str, test: object, outcome: Outcome) -> None:
        self._outcomes[backend][str(test)] = outcome

    def leave_out(self, name: str, reason: str) -> None:
        self._left_out[name] = reason

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
        """Returns a table of counts, what is left out and why, and all reasons and errors."""
        files = sorted({name.partition(":")[0] for name in self._outcomes[self.backends[0]]})
        heads = " | ".join(f"{backend}: {' / '.join(_COUNTED)}" for backend in self.backends)
        lines = [f"| file | {heads} |", "|---" * (1 + len(self.backends)) + "|"]
        for file in [*files, ""]:
            counts = " | ".join(self._counts(backend, file) for backend in self.backends)
            lines.append(f"| {file or 'all'} | {counts} |")
        for reason, count in Counter(self._left_out.values()).items():
            names = ", ".join(name for name, why in self._left_out.items() if why == reason)
            lines.append(f"left out {count}: {reason}: {names}")
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


def compare(
    tests: Iterable[Test],
    run: Callable[[Test, str], Outcome],
    results: Results,
    options: argparse.Namespace,
) -> int:
    """Runs tests over each back end, prints what becomes of them, and returns the exit code.

    `options` are those of a parser(). 1 says that a test has failed over the last back end and
    passed over the first.
    """
    for test in tests:
        if not re.search(options.only, str(test)):
            continue
        for backend in results.backends:
            outcome = run(test, backend)
            results.add(backend, test, outcome)
            line = f"{outcome.outcome:8}{outcome.seconds:6.1f} s  {backend}  {test}"
            print(line, outcome.detail, flush=True)
            results.write(options.json)
    results.write(options.json)
    print(f"\n{results}")
    worse = results.worse()
    if worse:
        print(f"\nfailed over {results.backends[-1]} and passed over {results.backends[0]}:")
        print("\n".join(f"  {name}" for name in worse))
    return 1 if worse else 0


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that such programs share."""
    made = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument(
        "--backend",
        nargs="+",
        default=["gloo", "thalweg"],
        metavar="NAME",
        help="over which each test runs (default: gloo thalweg)",
    )
    made.add_argument(
        "--only", default="", metavar="PATTERN", help='regex found in "file: Class.test"'
    )
    made.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="of a test (default: 300)"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="gets the outcome of every test")
    return made


def _reasons(outcomes: dict[str, Outcome]) -> Iterator[str]:
    skipped = Counter(each.detail for each in outcomes.values() if each.outcome == SKIPPED)
    for reason, count in skipped.most_common():
        yield f"  {SKIPPED} {count}: {reason}"
    for name, each in outcomes.items():
        if each.outcome == FAILED:
            yield f"  {FAILED} {name}: {each.detail}"
