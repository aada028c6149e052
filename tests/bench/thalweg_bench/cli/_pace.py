"""Defines the options of `thalweg bench pace`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from thalweg_bench.cli import _types as types
from thalweg_bench.cli._shape import shape_of

if TYPE_CHECKING:
    from thalweg_bench.pace_case import PaceCase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=types.size, default=1_000_000, help="default 1000000")
    parser.add_argument("--steps", type=types.number(1, 10_000), default=100, help="default 100")
    parser.add_argument(
        "--step", type=types.positive, default=0.05, metavar="SECONDS", help="default 0.05"
    )
    parser.add_argument(
        "--slow",
        choices=("one", "random"),
        default="one",
        help="the last node in all its steps, or a random one in each step; default one",
    )
    parser.add_argument(
        "--factor", type=types.positive, default=10.0, help="by which a slow step takes longer"
    )
    parser.add_argument("--staleness", type=types.number(1, 64), default=8, help="default 8")
    parser.add_argument("--repeats", type=types.number(1, 1000), default=3, help="default 3")


def case_of(args: argparse.Namespace) -> PaceCase:
    from thalweg_bench.pace_case import PaceCase

    return PaceCase(
        shape=shape_of(args),
        size=args.bytes,
        steps=args.steps,
        step_seconds=args.step,
        slow=args.slow,
        factor=args.factor,
        staleness=args.staleness,
        repeats=args.repeats,
    )
