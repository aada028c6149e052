"""Runs newer tests of torch's back ends on the CPU over several back ends, and counts them.

    git clone --depth 1 --filter=blob:none --sparse https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test/distributed
    git clone --depth 1 --filter=blob:none https://github.com/meta-pytorch/torchcomms
    python tests/c10d/newer.py pytorch/test/distributed \\
        torchcomms/comms/torchcomms/tests/integration/py

Exits with 1 if a test has failed over the last back end and passed over the first, and with 2 if
the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import comparison
import conformance
import newer_suite
import torch_harness
from comparison import Results, compare
from conformance import SKIPPED, Outcome
from newer_suite import LeftOut, Test


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    newer_suite.install(options.timeout, options.hosts)
    results = Results(options.backend)
    return compare(_tests(options, results), partial(run, options.timeout), results, options)


def run(seconds: float, test: Test, backend: str) -> Outcome:
    """Runs a test over a back end, unless there is a reason not to."""
    reason = test.why_not(backend)
    if reason:
        return Outcome(test.name, SKIPPED, reason, 0.0, "")
    return conformance.run(test.cases[backend], test.name, seconds)


def _tests(options: argparse.Namespace, results: Results) -> Iterator[Test]:
    for folder in options.tests:
        for found in newer_suite.load(folder, options.backend):
            if isinstance(found, LeftOut):
                results.leave_out(found.name, found.reason)
            else:
                yield found


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison.parser("newer.py", __doc__)
    parser.add_argument(
        "tests",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help=f"has {newer_suite.COMMON}, or torchcomms' files *Test.py",
    )
    torch_harness.add_hosts_option(parser)
    options = parser.parse_args(argv)
    for folder in options.tests:
        if not newer_suite.is_known(folder):
            parser.error(f"{folder} has neither {newer_suite.COMMON} nor any file *Test.py")
    return options


if __name__ == "__main__":
    sys.exit(main())
