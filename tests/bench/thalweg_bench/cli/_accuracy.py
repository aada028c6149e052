"""Parses the arguments of `thalweg bench accuracy`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.codecs import LOSSY
from thalweg_bench.cli import _types as types

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]

MODELS = ("cnn", "resnet", "vit")
CODECS = ("fp32", "fp16", "powersgd:rank=4,start=10", *(kind.name for kind in LOSSY))

_EPILOG = """\
Every training runs on 2 nodes of one worker with 2 shards, all on this machine: its time says what
the codecs cost, not what they save. A minute each on two cores. FILE keeps a row per training:
{model, codec, seed, epochs, accuracy, seconds, raw_bytes, wire_bytes_sent, wire_bytes_received,
curve}; those it has already are not run again.

examples:
  thalweg bench accuracy --json rows.json --plots out
  thalweg bench accuracy --models vit --codec fp32 --codec powersgd:2 --seeds 1 --json rows.json

exit codes:
  0      measured; the table says which codec cost more accuracy than it may
  1      a training failed; it is named at the end, and the others were measured
  2      wrong arguments, or a program is missing
  130    Ctrl-C;  143  SIGTERM
"""


def add_parser(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    parser: argparse.ArgumentParser = cases.add_parser(
        "accuracy",
        help="what codecs make of a training's accuracy",
        description="Trains small models on Fashion-MNIST with one codec after the other.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        type=types.names(MODELS),
        default=("cnn", "resnet"),
        metavar="NAME,…",
        help=f"default cnn,resnet; known: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--codec",
        type=types.codec,
        action="append",
        metavar="CODEC",
        help=f"or a policy; may be given several times; default: {' '.join(CODECS)}",
    )
    parser.add_argument("--seeds", type=types.seeds, default=(1, 2, 3), help="default 1,2,3")
    parser.add_argument("--epochs", type=types.number(1, 1000), default=3, help="default 3")
    parser.add_argument(
        "--json", type=types.output, required=True, metavar="FILE", help="rows known and measured"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the curves there")
    parser.set_defaults(handler=guard(_run))


def _run(args: argparse.Namespace) -> None:
    from thalweg_bench import accuracy, accuracy_report

    codecs = tuple(dict.fromkeys(args.codec or CODECS))
    rows = accuracy.measure(accuracy.Case(args.models, codecs, args.seeds, args.epochs), args.json)
    print(accuracy_report.table(rows))
    if args.plots is not None:
        accuracy_report.draw(args.plots, rows)
