"""Parses the arguments of `thalweg bench placement`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from thalweg_bench.cli import _types as types

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]

_EPILOG = """\
Every sidecar hosts a shard. Each number of nodes runs with each number of aggregators that is not
larger, at each rate, in a cluster of its own: half a minute each, and root is needed. The rows are
those of `thalweg bench lab --local-shards 1`; the JSON is written after each cluster.

examples:
  thalweg bench placement --nodes 2,3,4,5,6 --rate 100mbit,250mbit,500mbit,1gbit \\
    --bytes 16000000 --repeats 3 --json rows.json --plot placement.png
  thalweg bench placement --nodes 8 --shards 0,2,4 --rate 100mbit --bytes 24000000

exit codes:
  0      measured, and every result was right
  1      a result was wrong, or a process failed or hung; it is named
  2      wrong arguments, not root, or a program is missing
  130    Ctrl-C;  143  SIGTERM
"""


def add_parser(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    parser: argparse.ArgumentParser = cases.add_parser(
        "placement",
        help="allreduces through shards in the sidecars, with and without aggregators",
        description="Measures one allreduce for several numbers of nodes and aggregators.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nodes", type=types.counts(2, 64), default=(4,), metavar="N,…", help="default 4"
    )
    parser.add_argument(
        "--shards",
        type=types.counts(0, 64),
        metavar="K,…",
        help="aggregators; default: from none to as many as nodes",
    )
    parser.add_argument(
        "--rate", type=types.rates, default="250mbit", metavar="RATE,…", help="default 250mbit"
    )
    parser.add_argument("--bytes", type=types.size, default=37_000_000, help="default 37000000")
    parser.add_argument("--repeats", type=types.number(1, 1000), default=5, help="default 5")
    parser.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=types.output, metavar="FILE", help="write a picture there")
    parser.set_defaults(handler=guard(_run))


def _run(args: argparse.Namespace) -> None:
    from thalweg_bench import placement, rows
    from thalweg_bench.cluster import Shape, check_installed
    from thalweg_bench.lab_case import LabCase

    check_installed()
    shape = Shape(args.nodes[0], 0, 1, args.rate[0], "fp32", local=True)
    case = LabCase(shape, args.bytes, "fp32", ("gloo",), args.repeats)
    shards = args.shards or range(max(args.nodes) + 1)
    sweep = placement.Sweep(case, args.nodes, shards, args.rate)
    found = placement.run(sweep, args.json)
    print(rows.format_table(found))
    print()
    print(placement.format_grid(found, sweep))
    if args.plot is not None:
        placement.plot(args.plot, found, sweep)
