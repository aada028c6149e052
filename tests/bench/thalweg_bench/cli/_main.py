"""Parses the arguments of `thalweg bench` for single measurements; see also _suite."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thalweg._job._processes import ServerError
from thalweg.codecs import WIRE_TYPES
from thalweg_bench.cli import (
    _accuracy,
    _codec,
    _collectives,
    _optim,
    _pace,
    _placement,
    _predict,
    _ps,
    _sharded,
    _step,
    _suite,
)
from thalweg_bench.cli import _types as types
from thalweg_bench.cli._shape import shape_of
from thalweg_bench.lab import LabError

if TYPE_CHECKING:
    from thalweg_bench.lab_case import LabCase, Outcome
    from thalweg_bench.rows import Row

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
Every node and aggregator gets a network namespace and a link of the given rate, so root is needed.
All systems take turns in the same processes; progress is shown on standard error. Settings of the
environment (THALWEG_CHUNK_BYTES and so on) reach servers and workers.

examples:
  thalweg bench lab --nodes 4 --shards 4 --rate 250mbit --bytes 25600000 --peers gloo,iperf3
  thalweg bench lab --nodes 4 --shards 0 --local-shards 1 --slow-node 4
  thalweg bench lab --nodes 1 --workers 2 --shards 0 --rate none --peers gloo,memcpy
  thalweg bench step --model bert-base --codec fp16 --peers ddp,torch-fp16
  thalweg bench step --rate 100mbit --codec powersgd:4 --peers ddp,torch-powersgd
  thalweg bench suite --out out/bench && thalweg bench report out/bench

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
    return int(args.handler(args))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of what follows `thalweg bench`."""
    bench = argparse.ArgumentParser(
        prog="thalweg bench",
        description="Measures Thalweg beside its peers in a laboratory network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cases = bench.add_subparsers(required=True, metavar="CASE")
    reduce_peers = ("gloo", "iperf3", "memcpy")

    lab = _add_case(cases, "lab", "one allreduce", _run_lab, reduce_peers, rate="250mbit")
    lab.add_argument("--bytes", type=types.size, default=25_600_000, help="default 25600000")
    _add_dtype(lab)
    _add_resources(lab)
    lab.add_argument(
        "--slow-shard",
        type=types.number(2, 100),
        default=1,
        metavar="FACTOR",
        help="the last shard's link has 1/FACTOR of the rate",
    )
    lab.add_argument(
        "--slow-node",
        type=types.number(2, 100),
        default=1,
        metavar="FACTOR",
        help="the last node's link has 1/FACTOR of the rate",
    )
    lab.add_argument(
        "--weighted", action="store_true", help="and the other shards have FACTOR as their weight"
    )

    peers = ("ddp", "torch-fp16", "torch-powersgd", "iperf3")
    step = _add_case(cases, "step", "a DDP step", _run_step, peers, rate="250mbit")
    _step.add_arguments(step)

    text = "steps with AdamW, on workers and on shards"
    _ps.add_arguments(_add_case(cases, "ps", text, _run_ps, ("iperf3",), rate="250mbit"))

    text = "nodes that are slow in some steps, in step and at their own pace"
    _pace.add_arguments(_add_case(cases, "pace", text, _run_pace, (), rate="none"))

    text = "the collectives of torch.distributed"
    many = _add_case(cases, "collectives", text, _run_collectives, ("gloo",), rate="250mbit")
    _collectives.add_arguments(many)

    _add_small_and_many(cases, reduce_peers)
    _placement.add_parser(cases, _guard)
    _predict.add_parser(cases, _guard)
    _codec.add_parser(cases, _guard)
    _sharded.add_parser(cases, _guard)
    _optim.add_parser(cases, _guard)
    _accuracy.add_parser(cases, _guard)
    _suite.add_parsers(cases, _guard)
    return bench


def _add_small_and_many(cases: _Commands, reduce_peers: tuple[str, ...]) -> None:
    latency = _add_case(
        cases, "latency", "p50 and p99 of small allreduces", _run_latency, ("gloo",), rate="none"
    )
    latency.add_argument("--bytes", type=types.size, default=4096, help="default 4096")
    _add_dtype(latency)
    latency.add_argument(
        "--count", type=types.number(1, 100_000), default=200, help="in each repeat; default 200"
    )

    sweep = _add_case(
        cases, "sweep", "allreduce of 4 KiB to 256 MiB", _run_sweep, reduce_peers, rate="250mbit"
    )
    _add_dtype(sweep)

    soak = _add_case(
        cases, "soak", "time and memory of many small allreduces", _run_soak, (), rate="none"
    )
    soak.add_argument("--bytes", type=types.size, default=65_536, help="default 65536")
    _add_dtype(soak)
    _add_resources(soak)
    soak.add_argument(
        "--count", type=types.number(10, 1_000_000), default=10_000, help="default 10000"
    )


def _add_case(
    cases: _Commands,
    name: str,
    text: str,
    handler: Callable[[argparse.Namespace], None],
    peers: tuple[str, ...],
    *,
    rate: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = cases.add_parser(
        name,
        help=text,
        description=f"Measures {text}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = types.number
    parser.add_argument("--nodes", type=number(1, 64), default=4, help="default 4")
    parser.add_argument("--shards", type=number(0, 64), default=4, help="default 4; 0: embedded")
    parser.add_argument(
        "--local-shards",
        choices=("0", "1"),
        default="0",
        help="1: every sidecar hosts a shard, beside those of --shards; default 0",
    )
    parser.add_argument("--workers", type=number(1, 16), default=1, help="per node; default 1")
    parser.add_argument("--rate", type=types.rate, default=rate, help=f"of links; default {rate}")
    parser.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    if peers:
        parser.add_argument("--repeats", type=number(1, 1000), default=5, help="default 5")
        parser.add_argument(
            "--peers",
            type=types.names(peers),
            default=peers[:1],
            metavar="NAME,…",
            help=f"default {peers[0]}; empty: none; known: {', '.join(peers)}",
        )
    else:
        parser.set_defaults(repeats=1, peers=())
    parser.set_defaults(handler=_guard(handler), slow_shard=1, slow_node=1, weighted=False)
    parser.set_defaults(codec="fp32")
    return parser


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=WIRE_TYPES, default="fp32", help="of the tensor")


def _add_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resources", type=types.output, metavar="FILE", help="write CPU, memory, bytes sent there"
    )


def _guard(handler: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    def guarded(args: argparse.Namespace) -> int:
        from thalweg_bench.rows import BenchError

        try:
            handler(args)
        except KeyboardInterrupt:
            return 130
        except LabError as error:
            print(f"thalweg bench: {error}", file=sys.stderr)
            return 2
        except (BenchError, ServerError, OSError) as error:
            print(f"thalweg bench: {error}", file=sys.stderr)
            return 1
        return 0

    return guarded


def _run_lab(args: argparse.Namespace) -> None:
    from thalweg_bench import lab_case

    _report_outcome(args, lab_case.run(_lab_case(args, args.bytes)))


def _run_step(args: argparse.Namespace) -> None:
    from thalweg_bench import step_case

    _report(args, step_case.run(_step.case_of(args)))


def _run_ps(args: argparse.Namespace) -> None:
    from thalweg_bench import ps_case

    _report(args, ps_case.run(_ps.case_of(args)))


def _run_pace(args: argparse.Namespace) -> None:
    from thalweg_bench import pace_case

    _report(args, pace_case.run(_pace.case_of(args)))


def _run_collectives(args: argparse.Namespace) -> None:
    from thalweg_bench import collectives_case

    _report(args, collectives_case.run(_collectives.case_of(args)))


def _run_latency(args: argparse.Namespace) -> None:
    from thalweg_bench import latency

    _report(args, latency.run(_lab_case(args, args.bytes), args.count))


def _run_sweep(args: argparse.Namespace) -> None:
    from thalweg_bench import sweep

    _report(args, sweep.run(_lab_case(args, 0)))


def _run_soak(args: argparse.Namespace) -> None:
    from thalweg_bench import soak

    _report_outcome(args, soak.run(_lab_case(args, args.bytes), args.count))


def _lab_case(args: argparse.Namespace, size: int) -> LabCase:
    from thalweg_bench.lab_case import LabCase

    return LabCase(shape_of(args), size, args.dtype, args.peers, args.repeats)


def _report_outcome(args: argparse.Namespace, outcome: Outcome) -> None:
    from thalweg_bench import resources

    _report(args, outcome.rows)
    if args.resources is not None:
        resources.write_json(args.resources, outcome.resources)


def _report(args: argparse.Namespace, found: list[Row]) -> None:
    from thalweg_bench import rows

    print(rows.format_table(found))
    if args.json is not None:
        rows.write_json(args.json, found)
