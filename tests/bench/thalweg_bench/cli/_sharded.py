"""Parses the arguments of `thalweg bench fsdp`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg_bench.cli import _types as types

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]
_CASES = ("flat", "hybrid")

_EPILOG = """\
A step is a forward and a backward pass with a transformer's parameters and hardly any computation:
it takes what its links take. The blocks are the units that torch gathers and reduces. "flat":
sharded over --nodes nodes of one worker, by FSDP2 (fully_shard) and FSDP1; "hybrid": inside each of
2 nodes of 2 workers, with copies on both. All systems of a case take turns in the same processes.
There are no aggregators: the nodes' sidecars host the shards. Every node gets a network namespace
and a link of the given rate, so root is needed. MB sent: by a node in a step, headers included.

examples:
  thalweg bench fsdp --json rows.json
  thalweg bench fsdp --cases hybrid --hybrid-codecs powersgd:4,onebit --rate 100mbit
  thalweg bench fsdp --width 64 --blocks 2 --repeats 1 --rate 1gbit

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
        "fsdp",
        help="a step of a model that torch shards, over Gloo and over Thalweg",
        description="Measures steps of sharded models over Gloo and over Thalweg, with codecs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, number = parser.add_argument, types.number
    add("--cases", type=types.names(_CASES), default=_CASES, help="default flat,hybrid")
    add("--nodes", type=number(2, 64), default=4, help="of flat; default 4")
    add("--rate", type=types.rate, default="250mbit", help="of links; default 250mbit")
    add("--width", type=number(8, 8192), default=512, help="of the transformer; default 512")
    add("--blocks", type=number(1, 1000), default=16, help="default 16: 50 million parameters")
    add("--codecs", type=_codecs, default="fp16,int8", help="of flat; default fp16,int8")
    add("--hybrid-codecs", type=_codecs, default="powersgd:4", help="default powersgd:4")
    add("--repeats", type=number(1, 1000), default=3, help="default 3")
    add("--json", type=types.output, metavar="FILE", help="write the rows there")
    parser.set_defaults(handler=guard(_run))


def _codecs(text: str) -> tuple[str, ...]:
    return tuple(types.step_codec(one) for one in text.split(",") if one)


def _run(args: argparse.Namespace) -> None:
    from thalweg_bench import rows, sharded_case
    from thalweg_bench.cluster import Shape, check_installed

    check_installed()
    shapes = {
        "flat": (Shape(args.nodes, 0, 1, args.rate, "fp32", local=True), args.codecs),
        "hybrid": (Shape(2, 0, 2, args.rate, "fp32", local=True), args.hybrid_codecs),
    }
    for codec in args.codecs:
        if "flat" in args.cases and codec.partition(":")[0] not in ("fp16", "bf16", "int8"):
            raise ConfigError(f"--codecs {codec}: shards are sent in fp16, bf16 or int8")
    found: list[sharded_case.Measured] = []
    for name in args.cases:
        shape, codecs = shapes[name]
        case = sharded_case.ShardedCase(shape, args.width, args.blocks, codecs, args.repeats)
        found += sharded_case.run(case)
    print(sharded_case.table(found))
    if args.json is not None:
        rows.write_json(args.json, [one.row for one in found])
