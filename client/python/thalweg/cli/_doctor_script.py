"""`thalweg doctor SCRIPT` runs a script for some steps and says what Thalweg does for it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thalweg.cli import _run


class Trial(NamedTuple):
    """How a script is tried."""

    nodes: int
    nproc: int  # workers per node
    codec: str | None  # sets THALWEG_CODEC
    steps: int = 3  # of the optimizer that steps first
    rate: float = 0.0  # bits per second of links to advise for; 0: no advice


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of the doctor, and those of Python: SCRIPT.py … or -m MODULE …

    argparse takes no optional positional argument that follows options.
    """
    begins = (i for i, word in enumerate(argv) if word == "-m" or word.endswith(".py"))
    begin = next(begins, len(argv))
    return list(argv[:begin]), list(argv[begin:])


def examine(command: list[str], trial: Trial) -> int:
    """Prints the report. Returns 0 if all that was asked for was activated, else 1.

    Raises ConfigError, before it starts anything, when there is no such script or module.
    """
    _run.check_is_there(command)
    with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
        report = Path(folder) / "report.json"
        worker = ["-m", "thalweg.cli._doctor_worker", str(report), str(trial.steps)]
        worker.append(str(trial.rate))
        code = _run.run(
            _run.Plan(
                nodes=trial.nodes,
                nproc=trial.nproc,
                shards=0,
                local_shards=None,
                codec=trial.codec,
                timeout=None,
                port=0,
                command=[*worker, *command],
                log="warn",
            )
        )
        lines = json.loads(report.read_text(encoding="utf-8")) if report.exists() else []
    if not lines:
        lines = [["FAIL", f"the first worker has ended with code {code}, and without a report"]]
    workers = f"{trial.nproc} worker{'s' * (trial.nproc > 1)} on each of {trial.nodes} node"
    print(f"\n{' '.join(command)}, with {workers}{'s' * (trial.nodes > 1)} on this machine:")
    for level, text in lines:
        print(f"{level:<5} {text}")
    return 1 if code or any(level == "FAIL" for level, _ in lines) else 0
