"""`thalweg status` shows what shards or sidecars are doing, from their HTTP API (docs/api.md)."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from thalweg._settings._config import ConfigError, parse_addresses
from thalweg.cli import _http, _types
from thalweg.cli._look import Collectives, Look, look, look_at_sidecar

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_A = TypeVar("_A", Look, Collectives)
_DEFAULT = "localhost:7071"  # the chart's port; the host is a name in its certificates
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"
_EPILOG = """\
The shards are named by the addresses of their HTTP ports (thalweg-aggregator --http); the page that
a browser shows there says the same. Rates are over the interval between two looks.

A sidecar (thalweg-sidecar --http, or THALWEG_HTTP for one that a worker starts) knows the latest 50
collectives of the back end "thalweg" on its node: which ranks have come to each, and what is open.

examples:
  thalweg status --shards aggregator-0:7071,aggregator-1:7071 --watch
  thalweg status --sidecars node0:7072,node1:7072

exit codes:
  0      every shard or sidecar has answered
  1      one has not; the table says which, and why
  2      wrong arguments
  130    Ctrl-C
"""


def add_parser(commands: _Commands) -> None:
    """Adds the command to `thalweg`'s."""
    parser = commands.add_parser(
        "status",
        help="show what shards and sidecars are doing",
        description="Shows jobs, nodes, rates and recent faults of aggregator shards, or the "
        "latest collectives of sidecars.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shards",
        metavar="HOST:PORT,…",
        help=f"their HTTP addresses; default: {_DEFAULT}",
    )
    parser.add_argument(
        "--sidecars",
        metavar="HOST:PORT,…",
        help="show the latest collectives of these sidecars, by their HTTP addresses, instead",
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each sample")
    parser.add_argument(
        "--interval",
        type=_types.seconds(0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="default 1",
    )
    _http.add_arguments(parser)
    parser.set_defaults(handler=_handle)


def _handle(args: argparse.Namespace) -> int:
    access = _http.access_of(args)
    show = _Show(args.watch, args.json, args.interval)
    if args.sidecars is not None and args.shards is not None:
        raise ConfigError("give --shards or --sidecars, not both")
    try:
        if args.sidecars is not None:
            return collectives(_addresses("--sidecars", args.sidecars), access, show)
        shards = _DEFAULT if args.shards is None else args.shards
        return status(_addresses("--shards", shards), access, show)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _addresses(option: str, text: str) -> Sequence[str]:
    addresses = parse_addresses(option, text)
    if not addresses:
        raise ConfigError(f"{option} is empty, expected HOST:PORT,…")
    return addresses


class _Show(NamedTuple):
    watch: bool
    as_json: bool
    interval: float

    @property
    def live(self) -> bool:
        return self.watch and not self.as_json and sys.stdout.isatty()

    def print(self, lines: Sequence[str]) -> None:
        print(_frame(lines) if self.live else "\n".join(lines) + "\n" * self.watch, flush=True)


def status(addresses: Sequence[str], access: _http.Access, show: _Show) -> int:
    """Prints the shards' state once, or every `show.interval` seconds; returns the exit code."""
    from thalweg.cli import _status_table

    before: list[Look] = []
    if show.live:
        print(_CLEAR, end="")
    for now in _answers(look, addresses, access, show.interval):
        if show.as_json:
            print(json.dumps({"shards": [each._asdict() for each in now]}), flush=True)
        elif not before and any(not each.error for each in now):
            before = now  # rates need two samples
            continue
        else:
            show.print(_status_table.lines(before, now))
        if not show.watch:
            return int(any(each.error for each in now))
        before = now
    raise AssertionError("looks do not end")


def collectives(addresses: Sequence[str], access: _http.Access, show: _Show) -> int:
    """Prints the sidecars' latest collectives, as status() does."""
    from thalweg.cli import _status_collectives

    if show.live:
        print(_CLEAR, end="")
    for now in _answers(look_at_sidecar, addresses, access, show.interval):
        if show.as_json:
            print(json.dumps({"sidecars": [each._asdict() for each in now]}), flush=True)
        else:
            show.print(_status_collectives.lines(now))
        if not show.watch:
            return int(any(each.error for each in now))
    raise AssertionError("looks do not end")


def _frame(lines: Sequence[str]) -> str:
    """Replaces the terminal's contents without flicker."""
    rows = shutil.get_terminal_size().lines - 1
    return _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines[:rows]) + _CLEAR_REST


def _answers(
    ask: Callable[[str, _http.Access], _A],
    addresses: Sequence[str],
    access: _http.Access,
    interval: float,
) -> Iterator[list[_A]]:
    """Asks all at once, repeatedly: a dead one does not delay the others."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        due = time.monotonic()
        while True:
            yield list(pool.map(ask, addresses, itertools.repeat(access)))
            due = max(due + interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
