"""Defines the options of `thalweg bench ps`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg.codecs import WIRE_TYPES
from thalweg_bench.cli import _types as types
from thalweg_bench.cli._shape import shape_of
from thalweg_bench.shapes import MODELS

if TYPE_CHECKING:
    from thalweg_bench.ps_case import PsCase

_LOSSY = ("int8", "onebit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose parameters")
    parser.add_argument("--clip", type=types.positive, metavar="NORM", help="clip gradients to it")
    parser.add_argument(
        "--overlap", action="store_true", help="weights come with the next forward pass"
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="also let workers step by themselves, and exchange at the end of a run",
    )
    parser.add_argument(
        "--snapshot-every",
        type=types.number(1, 1000),
        metavar="STEPS",
        help="also let the aggregators write snapshots after so many steps",
    )
    parser.add_argument(
        "--steps", type=types.number(1, 1000), default=1, help="of a run; default 1"
    )
    parser.add_argument(
        "--forward",
        type=types.positive,
        default=0.0,
        metavar="SECONDS",
        help="a device works so long in a forward pass, and twice as long in a backward pass",
    )
    parser.add_argument(
        "--codec",
        choices=(*WIRE_TYPES, *_LOSSY),
        default="bf16",
        help="both ways; default bf16; weights come as differences in int8 and onebit",
    )


def case_of(args: argparse.Namespace) -> PsCase:
    from thalweg_bench.ps_case import PsCase

    shape = shape_of(args)
    if args.snapshot_every and (shape.shards == 0 or shape.local):
        raise ConfigError("--snapshot-every needs aggregators alone: --shards 1, --local-shards 0")
    if args.codec in _LOSSY and (args.local or args.snapshot_every):
        raise ConfigError(
            f"--codec {args.codec} goes with neither --local nor --snapshot-every: expected "
            f"{', '.join(WIRE_TYPES)}"
        )
    return PsCase(
        shape=shape,
        model=args.model,
        steps=args.steps,
        forward_seconds=args.forward,
        clip=args.clip,
        overlap=args.overlap,
        local=args.local,
        snapshot_every=args.snapshot_every or 0,
        peers=args.peers,
        repeats=args.repeats,
    )
