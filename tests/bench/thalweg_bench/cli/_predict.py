"""Parses the arguments of `thalweg bench predict`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from thalweg_bench.cli import _types as types
from thalweg_bench.shapes import MODELS

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]


def add_parser(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    text = "intervals of local updates in twelve configurations, beside what advice predicts"
    parser: argparse.ArgumentParser = cases.add_parser(
        "predict", help=text, description=f"Measures {text}; needs root."
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose parameters")
    parser.add_argument("--steps", type=types.number(1, 1000), default=10, help="default 10")
    parser.add_argument(
        "--forward",
        type=types.positive,
        default=0.1,
        metavar="SECONDS",
        help="a device works so long in a forward pass, and twice as long in a backward pass",
    )
    parser.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    parser.set_defaults(handler=guard(_run))


def _run(args: argparse.Namespace) -> None:
    from thalweg_bench import predict_case, rows
    from thalweg_bench.cluster import check_installed

    check_installed()
    asked = predict_case.predictions(args.model, args.steps, args.forward)
    found = predict_case.run(asked)
    print(predict_case.format_errors(asked, found))
    if args.json is not None:
        rows.write_json(args.json, found)
