"""Commands that other programs carry out: everything after the command's name is theirs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from thalweg import _binaries
from thalweg._settings._config import ConfigError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(commands: _Commands) -> None:
    """Adds the commands to `thalweg`'s."""
    _add(
        commands,
        "aggregator",
        "serve a shard: the program thalweg-aggregator",
        _binaries.aggregator,
    )
    _add(commands, "sidecar", "serve this node: the program thalweg-sidecar", _binaries.sidecar)
    _add(commands, "bench", "measure Thalweg beside its peers (in a development clone)", _bench)


def _add(
    commands: _Commands, name: str, text: str, handler: Callable[[Sequence[str]], int]
) -> None:
    # No argument begins with this prefix, so that --help too is left to the handler.
    parser = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(handler=lambda args: handler(args.arguments))


def _bench(arguments: Sequence[str]) -> int:
    for command in entry_points(group="thalweg.commands", name="bench"):
        return int(command.load()(arguments))
    raise ConfigError(
        "the benchmarks are not part of this installation: clone Thalweg's repository, run `make "
        "setup build` there, and use .venv/bin/thalweg of the clone"
    )
