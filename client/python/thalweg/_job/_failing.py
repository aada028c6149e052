"""Knows whether this process ends, or leaves a job, because something has failed."""

from __future__ import annotations

import functools
import multiprocessing.util as multiprocessing_util
import os
import sys

_failed: set[int] = set()  # processes


def is_failing() -> bool:
    """Whether an exception is on its way or being handled, or has ended the main program.

    Call note_failures() long before. A script that catches an error, and then ends by itself with
    sys.exit(1), looks as if it had ended well.
    """
    last = None if _is_interactive() else getattr(sys, "last_value", None)
    return os.getpid() in _failed or _is_failure(sys.exc_info()[1] or last)


def _is_interactive() -> bool:
    """Whether an error ends nothing here: it leaves the prompt, or the next cell of a notebook."""
    shell = sys.modules.get("IPython")  # which libraries import, too
    in_cells = shell is not None and shell.get_ipython() is not None
    return bool(sys.flags.interactive) or hasattr(sys, "ps1") or in_cells


@functools.cache
def note_failures() -> None:
    """Lets a child of multiprocessing know at its exit whether it ends with an exception.

    torch.multiprocessing.spawn catches what a worker raises and calls sys.exit(1), which leaves no
    sys.last_value. multiprocessing calls its finalizers while that exception is on its way; a main
    process calls them afterwards.
    """
    multiprocessing_util.Finalize(None, _note_failure, exitpriority=0)


def _note_failure() -> None:
    if _is_failure(sys.exc_info()[1]):
        _failed.add(os.getpid())


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
