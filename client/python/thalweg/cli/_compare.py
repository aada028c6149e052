"""`thalweg run --compare` runs a script with plain DDP, then with a codec, and tabulates both."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from thalweg._settings import _config
from thalweg._settings._config import ConfigError
from thalweg.cli import _run

_LEAST_STEPS = 3


class Run(NamedTuple):
    """What rank 0 has seen of one run."""

    steps: int
    median: float  # seconds per step, without the first one
    total: float  # seconds from the first step's end to the last one's
    raw_bytes: float  # of gradients per step; 0: nothing was attached
    sent_bytes: float  # per step, by its node
    codec: str
    error_ratio: float


def compare(plan: _run.Plan) -> int:
    """Prints the table and returns the exit code, that of the first run which fails; names that.

    Raises ConfigError when there is one worker, a run has too few steps, the first is not plain
    DDP, or the second is.
    """
    served, local = _config.Served.from_env(), _config.LocalUpdates.from_env()
    if served.kind or local.every:
        asked = served.variables if served.kind else local.variables
        raise ConfigError(f"--compare is for codecs, over which {asked[0]} wins: unset it")
    codec = plan.codec or _config.Activation.from_env().codec
    if not codec:
        raise ConfigError("--compare needs a codec: give --codec, or set THALWEG_CODEC")
    if plan.nodes * plan.nproc == 1:
        raise ConfigError(
            "--compare needs workers that average: give --nodes or --nproc, of 2 or more"
        )
    _run.check_is_there(plan.command)
    runs = []
    for name, variables in (
        ("plain DDP", {"THALWEG_ENABLE": "0"}),
        (f"codec {codec}", {"THALWEG_ENABLE": "1", "THALWEG_CODEC": codec}),
    ):
        chosen = dataclasses.replace(plan, variables=variables, codec=None, log="warn")
        code, found = _run_once(chosen)
        if code != 0:
            print(f"thalweg: the run with {name} has ended with code {code}", file=sys.stderr)
            return code
        if found.steps < _LEAST_STEPS:
            raise ConfigError(
                f"the script has made {found.steps} optimizer steps with {name}, expected "
                f"{_LEAST_STEPS} at least"
            )
        runs.append(found)
    plain, ours = runs
    if plain.raw_bytes:
        raise ConfigError("the script calls attach() by itself: --compare needs one that does not")
    if not ours.raw_bytes:
        raise ConfigError("nothing was attached: `thalweg doctor SCRIPT.py` says why")
    print("\n".join(table(plain, ours, plan.nodes, plan.nodes * plan.nproc)))
    return 0


def _run_once(plan: _run.Plan) -> tuple[int, Run]:
    with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
        result = Path(folder) / "result.json"
        command = ["-m", "thalweg.cli._compare_worker", str(result), *plan.command]
        code = _run.run(dataclasses.replace(plan, command=command))
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    times = found.get("times", [])
    spans = [after - before for before, after in itertools.pairwise(times)] or [0.0]
    counts = found.get("counts", {})
    steps = max(1, len(times))
    return code, Run(
        steps=len(times),
        median=statistics.median(spans),
        total=sum(spans),
        raw_bytes=counts.get("raw_bytes", 0.0) / steps,
        sent_bytes=counts.get("link_bytes_sent", 0.0) / steps,
        codec=" and ".join(found.get("codecs", [])),
        error_ratio=found.get("error_ratio", 0.0),
    )


def table(plain: Run, ours: Run, nodes: int, workers: int) -> list[str]:
    """Returns the lines of the comparison of two runs of so many workers on so many nodes."""
    ring = 2 * (workers - 1) / workers * ours.raw_bytes if nodes > 1 else 0.0
    rows = [
        ("", "plain DDP", "Thalweg"),
        ("optimizer steps", f"{plain.steps}", f"{ours.steps}"),
        ("ms per step, median", f"{plain.median * 1e3:.1f}", f"{ours.median * 1e3:.1f}"),
        ("s from the first step to the last", f"{plain.total:.2f}", f"{ours.total:.2f}"),
        ("MB over a node's link per step", f"{ring / 1e6:.3g} *", f"{ours.sent_bytes / 1e6:.3g}"),
    ]
    if ours.error_ratio:
        rows.append(("relative error of a step", "", f"{ours.error_ratio:.3g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {first:>{widths[1]}}  {second:>{widths[2]}}".rstrip()
        for name, first, second in rows
    ]
    return [
        "",
        *lines,
        f"codec {ours.codec}; * computed for a ring through all workers, in each direction",
        "All processes share this machine, whose loopback device is faster than a network.",
    ]
