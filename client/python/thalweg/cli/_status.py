"""`thalweg status` shows what the shards are doing, from their HTTP API (docs/api.md)."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from thalweg._config import ConfigError, parse_addresses
from thalweg.cli import _http
from thalweg.cli._look import Look, look

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT = "localhost:7071"  # the chart's port; the host is a name in its certificates
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"
_EPILOG = """\
The shards are named by the addresses of their HTTP ports (thalweg-aggregator --http); the page that
a browser shows there says the same. Rates are over the interval between two looks.

exit codes:
  0      every shard has answered
  1      one has not; the table says which, and why
  2      wrong arguments
  130    Ctrl-C
"""


def add_parser(commands: _Commands) -> None:
    """Adds the command to `thalweg`'s."""
    parser = commands.add_parser(
        "status",
        help="show what aggregator shards are doing",
        description="Shows jobs, nodes, rates and recent faults of aggregator shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shards",
        metavar="HOST:PORT,…",
        default=_DEFAULT,
        help=f"their HTTP addresses; default: {_DEFAULT}",
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each sample")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="default 1"
    )
    _http.add_arguments(parser)
    parser.set_defaults(handler=_handle)


def _handle(args: argparse.Namespace) -> int:
    addresses = parse_addresses("--shards", args.shards)
    if not addresses:
        raise ConfigError("--shards is empty, expected HOST:PORT,…")
    access = _http.access_of(args)
    try:
        return status(
            addresses, access, watch=args.watch, as_json=args.json, interval=args.interval
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def status(
    addresses: Sequence[str], access: _http.Access, *, watch: bool, as_json: bool, interval: float
) -> int:
    """Prints the state once, or every `interval` seconds, and returns the exit code."""
    from thalweg.cli import _status_table

    before: list[Look] = []
    looks = _looks(addresses, access, interval)
    live = watch and not as_json and sys.stdout.isatty()
    if live:
        print(_CLEAR, end="")
    for now in looks:
        if as_json:
            print(json.dumps({"shards": [look._asdict() for look in now]}), flush=True)
        elif not before and any(not look.error for look in now):
            before = now  # rates need two samples
            continue
        else:
            lines = _status_table.lines(before, now)
            print(_frame(lines) if live else "\n".join(lines) + "\n" * watch, flush=True)
        if not watch:
            return int(any(look.error for look in now))
        before = now
    raise AssertionError("looks do not end")


def _frame(lines: Sequence[str]) -> str:
    """Replaces the terminal's contents without flicker."""
    rows = os.get_terminal_size().lines - 1
    return _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines[:rows]) + _CLEAR_REST


def _looks(addresses: Sequence[str], access: _http.Access, interval: float) -> Iterator[list[Look]]:
    """Asks all shards at once, repeatedly: a dead shard does not delay the others."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        due = time.monotonic()
        while True:
            yield list(pool.map(look, addresses, itertools.repeat(access)))
            due = max(due + interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def _interval(text: str) -> float:
    number = float(text)
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 3600")
    return number
