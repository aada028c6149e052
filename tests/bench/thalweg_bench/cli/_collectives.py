"""Defines the options of `thalweg bench collectives`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from thalweg_bench.cli import _types as types
from thalweg_bench.cli._shape import shape_of

if TYPE_CHECKING:
    from thalweg_bench.collectives_case import CollectivesCase

# They are the keys of thalweg_bench.collectives.KINDS; that module would load torch.
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_NAMES = (*_REDUCING, "all_gather", "broadcast", "all_to_all", "barrier")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=types.names(_NAMES),
        default=_NAMES,
        metavar="NAME,…",
        help=f"default all: {', '.join(_NAMES)}",
    )
    parser.add_argument(
        "--bytes",
        type=types.size,
        default=102_400_000,
        help="that a rank gives or gets, whichever is more; default 102400000",
    )
    parser.add_argument(
        "--count",
        type=types.number(1, 100_000),
        default=1,
        help="collectives in a turn, of which the median counts; default 1",
    )


def case_of(args: argparse.Namespace) -> CollectivesCase:
    from thalweg_bench.collectives_case import CollectivesCase

    return CollectivesCase(
        shape=shape_of(args),
        names=tuple(args.only),
        size=args.bytes,
        count=args.count,
        peers=args.peers,
        repeats=args.repeats,
    )
