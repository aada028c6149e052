"""Defines what all measurements have in common, and what a measurement gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from thalweg_bench.options import OutputFile, number
from thalweg_bench.rows import Row, format_table, markdown, say


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]  # none: those of --json are written already
    resources: list[dict[str, object]] = field(default_factory=list)
    text: str = ""  # shown in place of the rows' table

    def __str__(self) -> str:
        return self.text or format_table(self.rows)

    @classmethod
    def joined(cls, parts: Sequence[Outcome]) -> Outcome:
        rows = [row for part in parts for row in part.rows]
        return cls(rows, [entry for part in parts for entry in part.resources])

    @property
    def used(self) -> str:
        """The resources as a table."""
        heads = ("case", "process", "CPU-s per GB", "MB resident", "MB sent")
        keys = ("case", "process", "cpu_s_per_gb", "rss_mb", "sent_mb")
        lines = [[str(entry[key]).replace("None", "-") for key in keys] for entry in self.resources]
        return markdown(heads, lines)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command of `thalweg bench`: its fields are the options, its docstring is the help."""

    json: OutputFile = None
    repeats: Annotated[int, number(1, 1000)] = 5

    def check(self) -> None:
        """Raises ConfigError for options that are wrong together, and when a program is missing."""

    def run(self) -> Outcome:
        """Raises BenchError, LabError or ServerError."""
        raise NotImplementedError


def run_alternating(
    systems: Sequence[str], repeats: int, measure: Callable[[str, int], float]
) -> dict[str, list[float]]:
    """Measures each system once to warm up, then `repeats` times for its list, in turns."""
    results: dict[str, list[float]] = {system: [] for system in systems}
    for repeat in range(repeats + 1):
        for system in systems:
            seconds = measure(system, repeat)
            turn = f"{repeat}/{repeats}" if repeat else "warm-up"
            say(f"{turn} {system}: {seconds * 1e3:.3f} ms")
            if repeat > 0:
                results[system].append(seconds)
    return results
