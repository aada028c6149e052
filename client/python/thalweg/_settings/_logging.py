"""Thalweg's logger in scripts that may not have set up logging."""

from __future__ import annotations

import logging


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
