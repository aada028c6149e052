"""Implements the `thalweg` command."""

from thalweg.cli._main import main

__all__ = ["main"]
