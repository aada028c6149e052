"""Thalweg's logger in scripts that may not have set up logging."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from thalweg._settings._config import log_level
from thalweg._settings._variables import is_launched_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def prepare(level: int) -> logging.Logger:
    """Thalweg's logger, with `level` and a way to standard error unless the script has set them."""
    logger = logging.getLogger("thalweg")
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thalweg: %(message)s"))
        logger.addHandler(handler)
    return logger


def is_first(group: ProcessGroup | None = None) -> bool:
    """Returns whether this worker is rank 0 of `group`; None: of all. While there is no process
    group, the launcher's RANK says it.
    """
    import torch.distributed as dist  # the command line has it not loaded

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group) == 0
    return is_launched_first()


def say(level: int, text: str, group: ProcessGroup | None = None) -> None:
    """Logs `text` where is_first(), visible also if the script has not set up logging. `level` is
    one of Python's logging. Raises ConfigError.
    """
    if is_first(group):
        prepare(log_level()).log(level, "%s", text)
