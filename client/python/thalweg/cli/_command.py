"""The script or module, and its arguments, behind the options of a command."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them as the last ones: what follows SCRIPT is the script's, -- included."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "command", nargs=argparse.PARSER, metavar="SCRIPT", help="and the arguments for it"
    )


def of(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of the Python interpreter."""
    begin = args.command[0] == "--" and len(args.command) > 1  # Pythons before 3.13 leave it there
    return [*(["-m"] if args.module else []), *args.command[begin:]]
