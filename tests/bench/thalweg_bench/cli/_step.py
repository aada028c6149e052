"""Defines the options of `thalweg bench step`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg.codecs import PowerSGD, parse
from thalweg_bench.cli import _types as types
from thalweg_bench.cli._shape import shape_of
from thalweg_bench.shapes import MODELS

if TYPE_CHECKING:
    from thalweg_bench.step_case import StepCase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec",
        type=types.step_codec,
        default="fp32",
        help="a type, a codec of blocks, or powersgd:rank=4,… or auto, which start at 2 "
        "unless they have start=…",
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose parameters")


def case_of(args: argparse.Namespace) -> StepCase:
    """Raises ConfigError for arguments that are wrong together."""
    from thalweg_bench.step_case import StepCase

    codec = parse(args.codec)
    if "torch-powersgd" in args.peers:
        if not isinstance(codec, PowerSGD):
            raise ConfigError(
                "--peers torch-powersgd does what --codec powersgd:… says: give one, "
                f"got --codec {args.codec}"
            )
        if codec.rank == 2:
            raise ConfigError(
                "--peers torch-powersgd gets wrong results at rank 2 from gradients of rank 1, "
                "which are those measured here: give another rank"
            )
    return StepCase(shape_of(args), args.model, args.peers, args.repeats)
