"""`thalweg profile` says where the steps of a training script go (docs/swin.md)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg._settings import _variables
from thalweg._settings._config import ConfigError
from thalweg.cli import _command, _types

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
examples:
  thalweg profile train.py --epochs 3
  thalweg profile --nodes 2 --nproc 2 --codec powersgd:4 train.py
  thalweg profile --rate 940mbit train.py       (two nodes, and advice for a link of that rate)
  torchrun --nnodes 2 … --no-python thalweg profile --here train.py       (on each host)

The script runs unchanged for --skip and then --steps optimizer steps, and is ended there. Rank 0
prints a table with advice, and writes profile.md, profile.json and profile.png below --out.
"""


def add_parser(commands: _Commands) -> None:
    """Adds the command to `thalweg`'s."""
    profile = commands.add_parser(
        "profile",
        help="say where the steps of a training script go, and what would help",
        description="Runs some steps of a script and shows where they go.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = profile.add_argument
    add(
        "--nodes",
        type=_types.count,
        metavar="N",
        help="nodes on this machine (default 1; with --rate 2)",
    )
    add("--nproc", type=_types.count, metavar="L", help="workers per node (default 1)")
    add("--shards", type=_types.shards, metavar="S", help="aggregators (default 0)")
    add(
        "--codec",
        type=_types.codec,
        metavar="CODEC",
        help="sets THALWEG_CODEC, so that Thalweg averages gradients",
    )
    add("--here", action="store_true", help="this process is a worker that torchrun has started")
    add("--steps", type=_types.positive, default=50, help="optimizer steps to measure (default 50)")
    add("--skip", type=_types.natural, default=10, help="steps before these (default 10)")
    add(
        "--rate",
        type=_types.rate,
        metavar="RATE",
        help="advise for links between nodes of this rate; default: as measured",
    )
    add(
        "--out",
        type=_types.folder,
        default=Path("profile"),
        metavar="FOLDER",
        help="default: profile",
    )
    _command.add_arguments(profile)
    profile.set_defaults(handler=_profile)


def _profile(args: argparse.Namespace) -> int:
    from thalweg.cli import _profile_report

    _check(args)
    args.out = args.out.absolute()  # the script may leave this folder
    if not args.here or _variables.is_launched_first():
        _profile_report.check_folder(args.out)
    if args.here:
        from thalweg.cli import _profile_worker

        return _profile_worker.run(args)
    from thalweg.cli import _run

    inner = _command.of(args)
    _run.check_is_there(inner)
    command = ["-m", "thalweg", "profile", "--here", "--steps", str(args.steps)]
    command += ["--skip", str(args.skip), "--out", str(args.out)]
    command += ["--rate", _types.rate_as_text(args.rate)] if args.rate else []
    return _run.run(
        _run.Plan(
            nodes=args.nodes or (2 if args.rate else 1),
            nproc=args.nproc or 1,
            shards=args.shards or 0,
            local_shards=None,
            codec=args.codec,
            timeout=None,
            port=0,
            command=[*command, *inner],
        )
    )


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that would have no effect."""
    of_cluster = (args.nodes, args.nproc, args.shards, args.codec)
    if args.here and any(value is not None for value in of_cluster):
        raise ConfigError(
            "--nodes, --nproc, --shards and --codec are not for --here, whose workers torchrun "
            "has started: set THALWEG_CODEC for the codec"
        )
    if args.rate and args.nodes == 1:
        raise ConfigError("--rate is that of links between nodes, and --nodes 1 leaves none")
