"""Runs a script as a worker of `thalweg run --compare`, and notes its steps.

    python -m thalweg.cli._compare_worker RESULT SCRIPT ARGS

Rank 0 writes the file RESULT, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thalweg.cli import _script

_SUMS = ("raw_bytes", "link_bytes_sent")


class Notes:
    """What a worker sees of its training: the time of each step, and Thalweg's counts after it."""

    def __init__(self) -> None:
        self.times: list[float] = []  # when each step ended, in seconds
        self.counts: Mapping[str, float] = {}  # of all modules; empty: none is attached
        self.codecs: list[str] = []
        self.error_ratio = 0.0
        self.world = 1

    def note(self, _: int) -> None:
        self.times.append(time.perf_counter())
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        ddp = sys.modules.get("thalweg.ddp")
        states = [] if ddp is None else list(ddp._states.values())
        if states:
            stats = [state.stats() for state in states]
            self.counts = {name: sum(each[name] for each in stats) for name in _SUMS}
            self.codecs = sorted({state.codec for state in states})
            self.error_ratio = max(each["error_ratio"] for each in stats)

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def main() -> None:
    result, *command = sys.argv[1:]
    notes = Notes()
    steps = _script.Steps(notes.note)
    try:
        _script.run(command)
    finally:
        steps.close()
        if os.environ.get("RANK", "0") == "0":
            Path(result).write_text(json.dumps(notes.as_dict()), encoding="utf-8")


if __name__ == "__main__":
    main()
