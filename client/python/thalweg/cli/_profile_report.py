"""Shows a profile: as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from thalweg._settings._config import ConfigError
from thalweg.cli._profile_advice import Measured

_COLORS = ("#937860", "#4c72b0", "#55a868", "#c44e52", "#8172b3", "#b0b0b0")


def table(measured: Measured, by_worker: Sequence[Mapping[str, float]], steps: int) -> str:
    """Returns a Markdown table of the phases, in milliseconds per step."""
    nodes = "1 node" if measured.nodes == 1 else f"{measured.nodes} nodes"
    workers = "1 worker" if measured.workers == 1 else f"{measured.workers} workers"
    exchanged = measured.exchange.said() if measured.workers > 1 else "nothing to average"
    link = "" if measured.rate is None else f", links of {measured.rate / 1e6:.4g} Mbit/s"
    lines = [
        f"{1e3 * measured.step:.1f} ms per step, mean of {steps} steps; {workers} on {nodes}{link}"
        f"; {exchanged}",
        "",
        "| phase | mean of the workers, ms | shortest, ms | longest, ms | share |",
        "|---|---|---|---|---|",
    ]
    for phase, seconds in measured.phases.items():
        of_workers = [1e3 * phases[phase] for phases in by_worker]
        lines.append(
            f"| {phase} | {1e3 * seconds:.1f} | {min(of_workers):.1f} | {max(of_workers):.1f} "
            f"| {measured.share(phase):.0%} |"
        )
    return "\n".join(lines)


def check_folder(folder: Path) -> None:
    """Raises ConfigError if show() could not write to the folder, or make it."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"--out {folder} cannot be made: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder} cannot be written to: no permission for {there}")


def show(
    folder: Path,
    measured: Measured,
    by_worker: Sequence[Mapping[str, float]],
    steps: int,
    advice: Sequence[str],
) -> None:
    """Prints the table with the advice, and then writes profile.md, which has the same,
    profile.json and profile.png. Raises ConfigError if these cannot be written.
    """
    text = table(measured, by_worker, steps)
    text += "\n\n" + "\n".join(f"- {line}" for line in advice) + "\n"
    print(text, flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile.md").write_text(text, encoding="utf-8")
        _write_data(folder, measured, by_worker, steps, advice)
        _draw(folder / "profile.png", by_worker)
    except ImportError:
        print(f"{folder}/profile.png was not drawn: pip install matplotlib")
    except OSError as error:
        path = error.filename or folder
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _write_data(
    folder: Path,
    measured: Measured,
    by_worker: Sequence[Mapping[str, float]],
    steps: int,
    advice: Sequence[str],
) -> None:
    found = {"steps": steps, "workers": list(by_worker), "advice": list(advice)}
    found["measured"] = {k: v for k, v in asdict(measured).items() if k != "gradients"}
    text_json = json.dumps(found, indent=2) + "\n"
    (folder / "profile.json").write_text(text_json, encoding="utf-8")


def _draw(path: Path, by_worker: Sequence[Mapping[str, float]]) -> None:
    """Draws a bar for each worker."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 0.4 * len(by_worker)), layout="constrained")
    ax = figure.subplots()
    names = [f"worker {rank}" for rank in range(len(by_worker))]
    left = [0.0] * len(by_worker)
    for phase, color in zip(by_worker[0], _COLORS, strict=True):
        widths = [1e3 * phases[phase] for phases in by_worker]
        ax.barh(names, widths, left=left, color=color, label=phase)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    ax.invert_yaxis()
    ax.set_xlabel("ms per step")
    figure.legend(loc="outside upper center", ncols=len(by_worker[0]), fontsize=8)
    figure.savefig(path, dpi=80)
