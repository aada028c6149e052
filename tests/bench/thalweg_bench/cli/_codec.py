"""Parses the arguments of `thalweg bench codec`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg.codecs import PowerSGD
from thalweg_bench.cli import _types as types
from thalweg_bench.shapes import MODELS

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]

_EPILOG = """\
All gradients lie in one bucket, on one node, and nothing crosses a network. Thalweg's time is that
of everything its sidecar computes in a round, in the program thalweg-codec-rounds, which `make
build` builds; torch's is that of its powerSGD_hook, from the call until its future is done. They
take turns. bound_s: the least passes over the compressed gradients, seven for PowerSGD and four
for the others, at the speed of memcpy.

examples:
  thalweg bench codec --codec powersgd:4 --shapes resnet50 --json rows.json
  thalweg bench codec --codec powersgd:rank=8,wire=fp16 --shapes 768x768,3072x768 --peers ''
  thalweg bench codec --codec int8 --shapes bert-base

exit codes:
  0      measured, and the first result was right
  1      a result was wrong, or the program failed or hung
  2      wrong arguments, or the program is missing
  130    Ctrl-C
"""


def add_parser(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    parser: argparse.ArgumentParser = cases.add_parser(
        "codec",
        help="encoding and decoding without a network",
        description="Measures what a codec computes: powersgd, or a lossy one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--codec", type=types.compressing_codec, default="powersgd:4", help="default powersgd:4"
    )
    parser.add_argument(
        "--shapes",
        type=types.shapes,
        default="resnet50",
        metavar="MODEL|NxM,…",
        help=f"of the gradients; default resnet50; known: {', '.join(MODELS)}",
    )
    parser.add_argument("--threads", type=types.number(1, 256), default=1, help="default 1")
    parser.add_argument("--repeats", type=types.number(1, 1000), default=5, help="default 5")
    parser.add_argument(
        "--peers",
        type=types.names(("torch",)),
        metavar="NAME,…",
        help="torch, the default for powersgd, which alone it has; empty: none",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("build/release"),
        metavar="DIR",
        help="where thalweg-codec-rounds is; default build/release",
    )
    parser.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    parser.set_defaults(handler=guard(_run))


def _run(args: argparse.Namespace) -> None:
    from thalweg_bench import codec_case, codec_rounds, rows

    program = codec_rounds.find_program(args.dir)
    if program is None:
        raise ConfigError(
            f"there is no program {codec_rounds.PROGRAM} in {args.dir}: build first (make build), "
            "or give --dir"
        )
    model, shapes = args.shapes
    has_peer = isinstance(args.codec, PowerSGD)
    peers = ("torch",) * has_peer if args.peers is None else args.peers
    if peers and not has_peer:
        raise ConfigError(f"torch has no {args.codec.name}: give --peers ''")
    case = codec_case.CodecCase(args.codec, model, shapes, args.threads, peers, args.repeats)
    found = codec_case.run(case, program)
    print(rows.format_table(found))
    if args.json is not None:
        rows.write_json(args.json, found)
