"""`thalweg bench accuracy` trains the example's models with one codec after the other.

Every training is a process of its own. Rows are stored in a file as they are measured, so that an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thalweg_bench import cluster
from thalweg_bench.rows import BenchError, count, say
from thalweg_bench.suite import run_watched

_NODES, _SHARDS = 2, 2
_CURVE_EVERY = 117  # steps: four points in each epoch of 468
_SECONDS = 70.0  # of a run, as long as none has been measured
_EPOCH_LIMIT = 600.0  # seconds after which an epoch counts as hung, on a busy machine


@dataclass(frozen=True)
class Run:
    model: str
    codec: str
    seed: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.model}, {self.codec}, seed {self.seed}"


@dataclass(frozen=True)
class Row:
    """One training. The JSON has exactly these keys."""

    model: str
    codec: str
    seed: int
    epochs: int
    accuracy: float  # fraction, on the test images at the end
    seconds: float
    raw_bytes: int  # gradients of a worker
    wire_bytes_sent: int  # sent by its node
    wire_bytes_received: int
    curve: list[dict[str, float]]  # {step, loss since the point before, accuracy}

    @property
    def run(self) -> Run:
        return Run(self.model, self.codec, self.seed, self.epochs)


@dataclass(frozen=True)
class Case:
    models: Sequence[str]
    codecs: Sequence[str]
    seeds: Sequence[int]
    epochs: int

    def runs(self) -> list[Run]:
        """Yields runs seed by seed, so that codecs can be compared before all is measured."""
        every = itertools.product(self.seeds, self.models, self.codecs)
        return [Run(model, codec, seed, self.epochs) for seed, model, codec in every]


def measure(case: Case, path: Path, train: Callable[[Run], Row] | None = None) -> list[Row]:
    """Returns the rows of `case`, which are also in `path`; measures only the missing ones.

    `train` measures a row. Raises BenchError after all others when a training fails.
    """
    if train is None:
        cluster.check_installed()
        train = _train
    rows = _read(path)
    known = {row.run for row in rows}
    left = [run for run in case.runs() if run not in known]
    say(f"{count(len(left), 'training')} to do, {len(case.runs()) - len(left)} known from {path}")
    failures = []
    for number, run in enumerate(left):
        minutes = sum(_estimate(rows, other) for other in left[number:]) / 60
        say(f"{run} ({number + 1}/{len(left)}), about {max(1, round(minutes))} min left")
        try:
            row = train(run)
        except BenchError as error:
            say(f"{run} failed: {error}")
            failures.append(str(run))
            continue
        say(f"{run}: accuracy {row.accuracy:.4f}, {row.seconds:.0f} s")
        rows.append(row)
        _write(path, rows)
    if failures:
        raise BenchError(f"failed: {'; '.join(failures)}; all others were measured")
    wanted = set(case.runs())
    return [row for row in rows if row.run in wanted]


def _estimate(rows: Sequence[Row], run: Run) -> float:
    """Returns the expected seconds of `run`."""
    alike = [row.seconds / row.epochs for row in rows if row.model == run.model]
    return run.epochs * statistics.mean(alike) if alike else _SECONDS


def _train(run: Run) -> Row:
    with tempfile.TemporaryDirectory(prefix="thalweg-accuracy-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        argv = [sys.executable, "-m", "thalweg", "run", "--nodes", str(_NODES), "--nproc", "1"]
        argv += ["--shards", str(_SHARDS), "-m", "thalweg.examples.fashion_mnist"]
        argv += ["--model", run.model, "--codec", run.codec, "--seed", str(run.seed)]
        argv += ["--epochs", str(run.epochs), "--curve-every", str(_CURVE_EVERY)]
        argv += ["--out", str(out)]
        try:
            with log.open("wb") as file:
                run_watched(argv, dict(os.environ), run.epochs * _EPOCH_LIMIT, file)
        except BenchError:
            say(log.read_text("utf-8", errors="replace")[-4000:])
            raise
        return make_row(run, json.loads(out.read_text("utf-8")))


def make_row(run: Run, history: dict[str, Any]) -> Row:
    """Makes a row from the example's output."""
    if not history["replicas_identical"]:
        raise BenchError("the workers' parameters differ at the end")
    stats = history["stats"]
    return Row(
        **asdict(run),
        accuracy=history["accuracy"],
        seconds=history["train_seconds"],
        raw_bytes=stats["raw_bytes"],
        wire_bytes_sent=stats["wire_bytes_sent"],
        wire_bytes_received=stats["wire_bytes_received"],
        curve=history["curve"],
    )


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    keys = {field.name for field in fields(Row)}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}; give another --json") from None
    if not isinstance(entries, list) or any(set(entry) != keys for entry in entries):
        raise BenchError(
            f"{path}: expected a list of objects with {', '.join(sorted(keys))}, "
            f"got {str(entries)[:80]}; give another --json"
        )
    return [Row(**entry) for entry in entries]


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Writes atomically: an interrupted run must not lose what it has measured."""
    new = path.with_name(f"{path.name}.new")
    text = ",\n".join(json.dumps(asdict(row)) for row in rows)
    new.write_text(f"[{text}]\n", encoding="utf-8")
    new.replace(path)
