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
import sys
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import comparison
import conformance
import fsdp2_suite
import torch_harness
from comparison import Results, compare
from conformance import SKIPPED, Outcome

# Files that are not run, by part of their name, and why.
LEFT_OUT = {
    "compile": "compiles for GPUs",
    "memory": "measures a GPU's memory",
    "overlap": "measures the streams of a GPU",
}


@dataclass(frozen=True)
class Test:
    """A test of a file, by its class and name."""

    file: str
    case: type[unittest.TestCase]
    name: str

    def __str__(self) -> str:
        return f"{self.file}: {self.case.__name__}.{self.name}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    fsdp2_suite.install(options.world_size, options.timeout)
    results = Results(options.backend)
    print(f"{options.world_size} workers")
    return compare(_tests(options, results), partial(run, options.timeout), results, options)


def run(seconds: float, test: Test, backend: str) -> Outcome:
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
            cases, why = [], torch_harness.why_not_loaded(error)
        if why:
            results.leave_out(file, why)
        for case in cases:
            yield from (Test(file, case, name) for name in torch_harness.tests(case))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison.parser("fsdp2.py", __doc__)
    parser.add_argument("tests", type=Path, metavar="FOLDER", help="has test_fully_shard_*.py")
    parser.add_argument(
        "--world-size", type=int, default=8, metavar="N", help="workers at most (default: 8)"
    )
    options = parser.parse_args(argv)
    if not next(options.tests.glob("test_fully_shard_*.py"), None):
        parser.error(f"{options.tests} has no test_fully_shard_*.py")
    return options


if __name__ == "__main__":
    sys.exit(main())
