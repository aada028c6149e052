"""The command `thalweg bench`, which thalweg finds as an entry point of `thalweg.commands`."""

from thalweg_bench.cli._main import main

__all__ = ["main"]
