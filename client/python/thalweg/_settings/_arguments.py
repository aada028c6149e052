"""What a script asks of its job by arguments, which win over the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from thalweg._settings._checks import (
    NODE_REDUCE,
    check_chunk_bytes,
    check_codec,
    check_count,
    check_local_shards,
    check_step_timeout,
    check_timeout,
)
from thalweg._settings._variables import check_choice


class JobArguments(NamedTuple):
    """Arguments of thalweg.ddp.attach() and thalweg.ps, which say what they mean; None: what the
    environment says.
    """

    codec: object = None
    timeout: float | None = None
    step_timeout: float | str | None = None
    chunk_bytes: int | None = None
    local_shards: str | bool | None = None
    min_nodes: int | None = None
    node_reduce: str | None = None
    residuals: str | os.PathLike[str] | None = None
    snapshot_every: int | None = None

    def checked(self) -> dict[str, Any]:
        """Returns those that are given, as fields of Config. Raises ConfigError that names the
        wrong one.
        """
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return {name: _CHECKS[name](name, value) for name, value in given.items()}


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "codec": check_codec,
    "timeout": check_timeout,
    "step_timeout": check_step_timeout,
    "chunk_bytes": check_chunk_bytes,
    "local_shards": check_local_shards,
    "min_nodes": check_count,
    "node_reduce": lambda name, value: check_choice(name, value, NODE_REDUCE),
    "residuals": lambda _, value: os.fspath(value),
    "snapshot_every": check_count,
}
