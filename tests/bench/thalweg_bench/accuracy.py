"""Measures what codecs make of the accuracy of the example's models.

Every training is a process of its own. Rows are stored in a file as they are measured, so that an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from thalweg._settings._config import ConfigError
from thalweg.codecs import LOSSY
from thalweg_bench import plots
from thalweg_bench.case import Case, Outcome
from thalweg_bench.cluster import check_installed
from thalweg_bench.options import Option, Seeds, names, number, policy_text
from thalweg_bench.programs import run_watched
from thalweg_bench.rows import BenchError, count, markdown, say, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = ("cnn", "resnet", "vit")
_CURVE_EVERY = 117  # steps: four points in each epoch of 468
_EPOCH_LIMIT = 600.0  # seconds after which an epoch counts as hung, on a busy machine
# A codec may cost this many points of accuracy, by its name.
_ALLOWED = {"fp16": 0.5, "powersgd": 0.5} | {k.name: 1.5 if k.is_coarse else 0.5 for k in LOSSY}

_HEADINGS = (
    *("model", "codec", "accuracy, % (smallest to largest)", "points from fp32", "allowed", "met"),
    *("bytes sent, of fp32's", "received", "seconds"),
)


@dataclass(frozen=True)
class Training:
    """One training's row. The JSON has exactly these keys."""

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
        return (self.model, self.codec, self.seed, self.epochs)


Run = tuple[str, str, int, int]  # what is trained: the first fields of its row


@dataclass(frozen=True, kw_only=True)
class AccuracyCase(Case):
    """what codecs make of a training's accuracy

    Trains small models on Fashion-MNIST with one codec after the other. Every training runs on 2
    nodes of one worker with 2 shards, all on this machine: its time says what the codecs cost, not
    what they save. A minute each on two cores. The file of --json keeps a row for each training;
    those it has already are not run again.

    example:
      thalweg bench accuracy --models vit --codec fp32 --codec powersgd:2 --seeds 1 --json rows.json
    """

    models: Annotated[tuple[str, ...], names(MODELS)] = ("cnn", "resnet")
    codec: Annotated[
        tuple[str, ...],
        Option(policy_text, "or a policy; may be given several times", "CODEC", action="append"),
    ] = ("fp32", "fp16", "powersgd:rank=4,start=10", *(kind.name for kind in LOSSY))
    seeds: Seeds = (1, 2, 3)
    epochs: Annotated[int, number(1, 1000)] = 3
    plots: Annotated[Path | None, Option(Path, "draw the curves there", "DIR")] = None

    def check(self) -> None:
        if self.json is None:
            raise ConfigError("trainings take long: give --json FILE, which keeps them")
        check_installed()

    def runs(self) -> list[Run]:
        """Yields runs seed by seed, so that codecs can be compared before all is measured."""
        every = product(self.seeds, self.models, dict.fromkeys(self.codec))
        return [(model, codec, seed, self.epochs) for seed, model, codec in every]

    def run(self) -> Outcome:
        assert self.json is not None
        rows = self.measure(self.json, _train)
        if self.plots is not None:
            draw(self.plots, rows)
        return Outcome([], text=table(rows))

    def measure(self, path: Path, train: Callable[[Run], Training]) -> list[Training]:
        """Returns the rows of this case, which are also in `path`; measures only missing ones.

        `train` measures a row. Raises BenchError after all others when a training fails.
        """
        rows, failures = _read(path), []
        left = [run for run in self.runs() if run not in [row.run for row in rows]]
        say(f"{count(len(left), 'training')} to do, the others are in {path}")
        for number_, run in enumerate(left, 1):
            name = f"{run[0]}, {run[1]}, seed {run[2]}"
            say(f"{name} ({number_}/{len(left)})")
            try:
                rows.append(train(run))
            except BenchError as error:
                say(f"{name} failed: {error}")
                failures.append(name)
                continue
            say(f"{name}: accuracy {rows[-1].accuracy:.4f}, {rows[-1].seconds:.0f} s")
            write_json(path, [asdict(row) for row in rows])
        if failures:
            raise BenchError(f"failed: {'; '.join(failures)}; all others were measured")
        return [row for row in rows if row.run in self.runs()]


def _read(path: Path) -> list[Training]:
    if not path.exists():
        return []
    try:
        return [Training(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise BenchError(f"{path} has no trainings: {error}; give another --json") from None


def _train(run: Run) -> Training:
    model, codec, seed, epochs = run
    with tempfile.TemporaryDirectory(prefix="thalweg-accuracy-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        argv = [sys.executable, "-m", "thalweg", "run", "--nodes", "2", "--nproc", "1"]
        argv += ["--shards", "2", "-m", "thalweg.examples.fashion_mnist", "--model", model]
        argv += ["--codec", codec, "--seed", str(seed), "--epochs", str(epochs)]
        argv += ["--curve-every", str(_CURVE_EVERY), "--out", str(out)]
        try:
            with log.open("wb") as file:
                run_watched(argv, epochs * _EPOCH_LIMIT, output=file, quiet=True)
        except BenchError:
            say(log.read_text("utf-8", errors="replace")[-4000:])
            raise
        return training_of(run, json.loads(out.read_text("utf-8")))


def training_of(run: Run, history: dict[str, Any]) -> Training:
    """Makes a row from the example's output."""
    if not history["replicas_identical"]:
        raise BenchError("the workers' parameters differ at the end")
    stats = history["stats"]
    return Training(
        *run,
        accuracy=history["accuracy"],
        seconds=history["train_seconds"],
        raw_bytes=stats["raw_bytes"],
        wire_bytes_sent=stats["wire_bytes_sent"],
        wire_bytes_received=stats["wire_bytes_received"],
        curve=history["curve"],
    )


def table(rows: Sequence[Training]) -> str:
    """Returns a line per model and codec, means over seeds; differences are of equal seeds."""
    groups = dict.fromkeys((row.model, row.codec) for row in rows)
    lines = [_line(of(rows, *group), of(rows, group[0], "fp32")) for group in groups]
    return markdown(_HEADINGS, lines)


def of(rows: Sequence[Training], model: str, codec: str) -> dict[int, Training]:
    """Returns the rows of a model and codec by their seeds."""
    return {row.seed: row for row in rows if (row.model, row.codec) == (model, codec)}


def _line(own: dict[int, Training], base: dict[int, Training]) -> tuple[str, ...]:
    first, percent = next(iter(own.values())), [100 * row.accuracy for row in own.values()]
    pairs = [(own[seed], base[seed]) for seed in own if seed in base]
    points = [100 * (row.accuracy - other.accuracy) for row, other in pairs]
    allowed = _ALLOWED.get(first.codec.partition(":")[0])
    difference, met, sent, received = ("-",) * 4
    if pairs:
        error = f" ± {statistics.stdev(points) / len(points) ** 0.5:.2f}" if points[1:] else ""
        difference = f"{statistics.mean(points):+.2f}{error}" if first.codec != "fp32" else "-"
        sent, received = (
            f"{sum(getattr(a, key) for a, _ in pairs) / sum(getattr(b, key) for _, b in pairs):.4f}"
            for key in ("wire_bytes_sent", "wire_bytes_received")
        )
        if allowed is not None:
            met = "yes" if statistics.mean(points) >= -allowed else "**no**"
    return (
        *(first.model, f"`{first.codec}`"),
        f"{statistics.mean(percent):.2f} ({min(percent):.2f} to {max(percent):.2f})",
        *(difference, "-" if allowed is None else f"-{allowed:.1f}", met, sent, received),
        f"{statistics.mean(row.seconds for row in own.values()):.0f}",
    )


def draw(folder: Path, rows: Sequence[Training]) -> None:
    """Writes FOLDER/accuracy-MODEL.png for each model. Raises ConfigError without matplotlib."""
    for model in dict.fromkeys(row.model for row in rows):
        figure = plots.new_figure()
        loss, accuracy = figure.subplots(1, 2)
        codecs = dict.fromkeys(row.codec for row in rows if row.model == model)
        for codec in codecs:
            own = list(of(rows, model, codec).values())
            _curve(loss, own, "loss")
            _curve(accuracy, own, "accuracy", unit=100, label=codec)
        loss.set(xlabel="step", ylabel="training loss", yscale="log")
        worst = min(row.accuracy for row in rows if row.model == model)
        accuracy.set(xlabel="step", ylabel="test accuracy, %", ylim=(100 * worst - 10, None))
        figure.suptitle(f"Fashion-MNIST, {model}: mean over seeds, smallest to largest")
        plots.save(figure, folder / f"accuracy-{model}.png")


def _curve(
    axes: Axes, rows: Sequence[Training], key: str, *, unit: float = 1, label: str = ""
) -> None:
    """Draws the mean over rows, in a band from the smallest to the largest."""
    steps = [point["step"] for point in rows[0].curve]
    points = [
        [unit * point[key] for point in same]
        for same in zip(*(row.curve for row in rows), strict=True)
    ]
    (line,) = axes.plot(steps, [statistics.mean(values) for values in points], label=label)
    low, high = [min(values) for values in points], [max(values) for values in points]
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
