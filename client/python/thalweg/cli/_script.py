"""Runs a script as `python SCRIPT ARGS` or `python -m MODULE ARGS` would, inside this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Done(BaseException):
    """The script has made enough steps. No Exception, so that scripts do not handle it."""


def run(command: Sequence[str]) -> None:
    """Runs `command`, which is SCRIPT ARGS or -m MODULE ARGS, as the main program.

    Raises what the script raises; an exit with code 0 or None is a return.
    """
    is_module = command[0] == "-m"
    sys.argv = list(command[1:] if is_module else command)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


class Steps:
    """Counts the steps of the optimizer that has stepped first."""

    def __init__(self, after: Callable[[int], None]) -> None:
        """`after` is called after each step with their number, from 1."""
        self.count = 0
        self._after = after
        self._first: Optimizer | None = None
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self.count += 1
            self._after(self.count)

    def close(self) -> None:
        """Counts no further step."""
        self._handle.remove()
