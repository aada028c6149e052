"""The command `thalweg bench`, which thalweg finds as an entry point of `thalweg.commands`."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from thalweg._job._processes import ServerError
from thalweg_bench.accuracy import AccuracyCase
from thalweg_bench.case import Case
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.codec_case import CodecCase
from thalweg_bench.collectives_case import CollectivesCase
from thalweg_bench.lab import LabError
from thalweg_bench.lab_case import LabCase, LatencyCase, SoakCase
from thalweg_bench.local_case import LocalCase
from thalweg_bench.micro import MicroCase
from thalweg_bench.optim_case import OptimCase
from thalweg_bench.options import add_options, make
from thalweg_bench.pace_case import PaceCase
from thalweg_bench.placement import PlacementCase
from thalweg_bench.ps_case import PsCase
from thalweg_bench.rows import BenchError, write_json
from thalweg_bench.sharded_case import FsdpCase
from thalweg_bench.step_case import StepCase
from thalweg_bench.suite import SuiteCase

# None of their modules loads torch, which the workers' parent must do in its own way.
COMMANDS: dict[str, Case] = {
    "lab": LabCase(),
    "placement": PlacementCase(),
    "step": StepCase(),
    "ps": PsCase(),
    "local": LocalCase(),
    "pace": PaceCase(),
    "collectives": CollectivesCase(),
    "fsdp": FsdpCase(),
    "latency": LatencyCase(),
    "soak": SoakCase(),
    "codec": CodecCase(),
    "optim": OptimCase(),
    "accuracy": AccuracyCase(),
    "micro": MicroCase(),
    "suite": SuiteCase(),
}
_EPILOG = """\
The cases but codec, optim, accuracy and micro give every node and aggregator a network namespace
and a link of the given rate, so root is needed. All systems take turns in the same processes;
progress is shown on standard error. Settings of the environment (THALWEG_CHUNK_BYTES and so on)
reach servers and workers. --json FILE has a list of rows {case, system, bytes, median_s, min_s,
max_s, bound_s}.

exit codes:
  0      measured, and every result was right
  1      a result was wrong, or a process failed or hung; it is named
  2      wrong arguments, not root, or a program is missing
  130    Ctrl-C;  143  SIGTERM
"""


def main(argv: Sequence[str]) -> int:
    """Runs `thalweg bench` with these arguments and returns its exit code.

    Raises ConfigError for arguments that are wrong together, and SystemExit for others.
    """
    args = make_parser().parse_args(argv)
    case = case_of(args)
    case.check()
    try:
        _run(case)
    except KeyboardInterrupt:
        return 130
    except (LabError, BenchError, ServerError, OSError) as error:
        print(f"thalweg bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, LabError) else 1
    return 0


def _run(case: Case) -> None:
    found = case.run()
    print(found)
    if case.json is not None and found.rows:
        write_json(case.json, [asdict(row) for row in found.rows])
    if (path := getattr(case, "resources", None)) is not None:
        print(f"\n{found.used}")
        write_json(path, found.resources)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of what follows `thalweg bench`."""
    common: dict[str, Any] = {
        "epilog": _EPILOG,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    bench = argparse.ArgumentParser(
        prog="thalweg bench", description="Measures Thalweg beside its peers.", **common
    )
    cases = bench.add_subparsers(required=True, metavar="CASE")
    for name, case in COMMANDS.items():
        text, _, more = (inspect.getdoc(case) or "").partition("\n")
        parser = cases.add_parser(
            name,
            help=text,
            description=f"Measures {text}.\n{more}",
            argument_default=argparse.SUPPRESS,
            **common,
        )
        if isinstance(case, ClusterCase):
            add_options(parser, case.shape)
        add_options(parser, case)
        parser.set_defaults(case=case)
    return bench


def case_of(args: argparse.Namespace) -> Case:
    """Makes the case that the arguments describe."""
    case: Case = make(args.case, args)
    return replace(case, shape=make(case.shape, args)) if isinstance(case, ClusterCase) else case
