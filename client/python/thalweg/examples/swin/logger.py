"""Writes the log of a training: lines for people that contain JSON for the parser.

Their names are those of the logger of TorchAcc's Swin example, whose switch USE_TORCHACC means the
optimised path here.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARAMS, METRICS = "params", "metrics"  # what precedes the JSON
FILE = "log"
_OFF = ("", "0", "false", "no", "off")


def create_logger(folder: Path, *, shown: bool = True, name: str = "swin") -> logging.Logger:
    """Returns a logger that appends to FOLDER/log and, if `shown`, writes to standard output.

    An earlier logger of that name is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.FileHandler(folder / FILE, encoding="utf-8")]
    if shown:
        handlers.append(logging.StreamHandler(sys.stdout))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return logger


def enable_torchacc_compiler(logger: logging.Logger | None = None) -> bool:
    """Returns whether USE_TORCHACC asks for the optimised path; says what runs in its place."""
    return _enabled(
        logger,
        "gradients are averaged by Thalweg's hook in the place of TorchAcc's compiler; "
        "MODEL.COMPILE adds torch.compile",
    )


def enable_torchacc_kernel(logger: logging.Logger | None = None) -> bool:
    """Returns whether USE_TORCHACC asks for optimised kernels; says what runs in their place."""
    return _enabled(logger, "thalweg.optim's fused AdamW runs in the place of TorchAcc's kernels")


def log_params(logger: logging.Logger, params: Mapping[str, Any]) -> None:
    """Logs what a run was started with."""
    logger.info("%s %s", PARAMS, json.dumps(dict(params), sort_keys=True))


def log_metrics(logger: logging.Logger, metrics: Mapping[str, Any]) -> None:
    """Logs measurements; those of one kind have the same keys in every line."""
    logger.info("%s %s", METRICS, json.dumps(dict(metrics)))


def _enabled(logger: logging.Logger | None, instead: str) -> bool:
    value = os.environ.get("USE_TORCHACC", "")
    if value.lower() in _OFF:
        return False
    if logger is not None:
        logger.info("USE_TORCHACC=%s: %s", value, instead)
    return True
