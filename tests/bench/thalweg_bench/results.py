"""Reads the folder of `thalweg bench suite`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thalweg_bench.rows import BenchError, Row
from thalweg_bench.suite_cases import CASES

_ROW_KEYS = {field.name for field in fields(Row)}
_RESOURCE_KEYS = {"case", "process", "cpu_s_per_gb", "rss_mb", "sent_mb"}


@dataclass(frozen=True)
class Results:
    """Results by the suite's cases, in its order; cases not measured are missing."""

    rows: Mapping[str, Sequence[Row]]
    resources: Mapping[str, Sequence[Mapping[str, Any]]]
    machine: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Reads the folder. Raises BenchError."""
        rows, resources = {}, {}
        for name in CASES:
            path, used = folder / f"{name}.json", folder / f"{name}.resources.json"
            if path.exists():
                rows[name] = [Row(**entry) for entry in _read_entries(path, _ROW_KEYS)]
            if used.exists():
                resources[name] = _read_entries(used, _RESOURCE_KEYS)
        path = folder / "machine.json"
        if not rows or not path.exists():
            raise BenchError(
                f"{folder} has not what a suite leaves, machine.json and a NAME.json at least: "
                f"run `thalweg bench suite --out {folder}` first"
            )
        machine = _read_json(path)
        if not isinstance(machine, dict) or not isinstance(machine.get("cases"), dict):
            raise BenchError(f"{path}: expected an object with 'cases', got {str(machine)[:80]}")
        return cls(rows, resources, machine)

    def find(self, name: str, system: str, ending: str = "", size: int | None = None) -> Row | None:
        """Returns the first row of a system whose case has that ending."""
        for row in self.rows.get(name, ()):
            if row.system == system and row.case.endswith(ending) and size in (None, row.bytes):
                return row
        return None

    def used(self, name: str, process: str, ending: str = "") -> Mapping[str, Any] | None:
        """Returns the first entry of a process, such as "aggregator max", whose case has that
        ending.
        """
        for entry in self.resources.get(name, ()):
            if entry["process"] == process and str(entry["case"]).endswith(ending):
                return entry
        return None


def _read_entries(path: Path, keys: set[str]) -> list[dict[str, Any]]:
    entries = _read_json(path)
    good = isinstance(entries, list) and all(
        isinstance(entry, dict) and set(entry) == keys for entry in entries
    )
    if not good:
        raise BenchError(
            f"{path}: expected a list of objects with {', '.join(sorted(keys))}, "
            f"got {str(entries)[:80]}; measure that case again"
        )
    return list(entries)


def _read_json(path: Path) -> Any:  # noqa: ANN401 - whatever is in the file
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}; measure that case again") from None
