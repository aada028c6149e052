"""`thalweg trace` merges the files of THALWEG_TRACE into one timeline (docs/timeline.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOWN = 20
_EPILOG = """\
examples:
  THALWEG_TRACE=traces thalweg run --nodes 2 --nproc 2 --codec fp16 train.py
  thalweg trace merge traces -o merged.json
  thalweg trace merge traces --torch profile.json -o merged.json
  thalweg trace check merged.json

merged.json opens in https://ui.perfetto.dev and chrome://tracing.

exit codes:
  0      done; with check: nothing is missing
  1      check has found something missing, or in an order that cannot be
  2      wrong arguments, a file that is no trace, or one that cannot be read or written
"""


def add_parser(commands: _Commands) -> None:
    """Adds the command to `thalweg`'s."""
    trace = commands.add_parser(
        "trace",
        help="join the traces of a job's processes, and check them",
        description="Joins the traces that THALWEG_TRACE=FOLDER leaves, and checks them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = trace.add_subparsers(required=True, metavar="VERB")
    merge = verbs.add_parser("merge", help="merge traces into one, on one clock")
    merge.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="traces, or folders that have them"
    )
    merge.add_argument(
        "--torch",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a worker's trace of torch.profiler; may be given again",
    )
    merge.add_argument("-o", "--output", required=True, type=Path, metavar="FILE")
    merge.set_defaults(handler=_merge)
    check = verbs.add_parser("check", help="check that every bucket has all phases, in order")
    check.add_argument("file", type=Path, metavar="FILE", help="a merged trace")
    check.set_defaults(handler=_check)


def _merge(args: argparse.Namespace) -> int:
    from thalweg.timeline import files, merge, torch_profile

    merge.check_output(args.output)
    found = files.find(args.paths)
    merge.check_is_no_input(args.output, [*found, *args.torch])
    traces = [files.read(path) for path in found]
    merged = merge.merge(traces, [torch_profile.read(path) for path in args.torch])
    merged.write(args.output)
    for process in merged.processes:
        error = process.error_us
        print(f"{process.name}: clock {'not compared' if error is None else f'± {error:.1f} us'}")
    for warning in merged.warnings:
        print(f"thalweg: {warning}", file=sys.stderr)
    print(f"{args.output}: {len(merged.events)} events of {len(merged.processes)} processes")
    return 0


def _check(args: argparse.Namespace) -> int:
    from thalweg.timeline import check, spans

    timeline = spans.read(args.file)
    print("\n".join(check.table(timeline)))
    found = check.problems(timeline)
    for problem in found[:_SHOWN]:
        print(f"thalweg: {problem}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"thalweg: and {len(found) - _SHOWN} more", file=sys.stderr)
    if not found:
        print("every bucket has all phases, in order")
    return int(bool(found))
