"""Reads the logs of trainings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thalweg.examples.swin import SwinError
from thalweg.examples.swin.logger import METRICS, PARAMS

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """What a training comes to: medians over its intervals without the first, which warms up."""

    workers: int
    step_seconds: float
    data_seconds: float  # of the step, the wait for data
    images_per_second: float  # of all workers
    memory_mb: float  # largest, of a node's first worker
    sent_mb: float  # per step, by this node's network interfaces
    loss: float  # of the last interval
    top1: float | None  # percent, of the last validation; None: there was none
    top5: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Log:
    """A log's contents in the order of its lines."""

    path: Path
    params: Metrics
    train: Sequence[Metrics]
    validation: Sequence[Metrics]

    def column(self, name: str) -> list[float]:
        """Returns a metric of all training intervals."""
        return [entry[name] for entry in self.train]

    def summary(self) -> Summary:
        """Summarises a log that has at least one interval."""
        steady = self.train[1:] or self.train
        last = self.validation[-1] if self.validation else {}
        return Summary(
            workers=self.params["workers"],
            step_seconds=median(entry["step_seconds"] for entry in steady),
            data_seconds=median(entry["data_seconds"] for entry in steady),
            images_per_second=median(entry["images_per_second"] for entry in steady),
            memory_mb=max(self.column("memory_mb")),
            sent_mb=median(entry["sent_mb"] for entry in steady),
            loss=self.train[-1]["loss"],
            top1=last.get("top1"),
            top5=last.get("top5"),
        )


def parse_file(path: str | Path) -> Log:
    """Reads a log; the latest run counts if several have appended to it.

    A last line that a killed run has left incomplete is ignored. Raises SwinError if there is no
    such file, or if it is not the log of a training or has no metrics yet.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SwinError(f"{path} cannot be read: {error.strerror}") from None
    params: Metrics | None = None
    train: list[Metrics] = []
    validation: list[Metrics] = []
    for number, line in enumerate(lines, 1):
        what, _, text = line.partition(" INFO ")[2].partition(" ")
        if what not in (PARAMS, METRICS):
            continue
        try:
            entry = json.loads(text)
        except ValueError as error:
            if number == len(lines):
                break
            raise SwinError(f"{path}:{number}: the {what} are not JSON: {error}") from None
        if what == PARAMS:
            params, train, validation = entry, [], []
        else:
            (train if entry.get("kind") == "train" else validation).append(entry)
    if params is None:
        raise SwinError(f"{path} is no log of a training: it has no line with '{PARAMS}'")
    if not train:
        raise SwinError(f"{path} has no metrics yet: the training has ended or is before its first")
    return Log(path, params, train, validation)
