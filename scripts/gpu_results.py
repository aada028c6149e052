"""Reads what the programs of a bundle have written, for scripts/gpu_check."""

from __future__ import annotations

import contextlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any


def cases(report: Path) -> dict[str, Any]:
    """Reads a report of GoogleTest or pytest.

    Returns how many cases passed, which failed, which were skipped and why, and recorded properties
    such as the path of gradients.
    """
    result: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for noted in ET.parse(report).iter("property"):
        result[noted.get("name", "")] = noted.get("value")
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        failure, skipped = case.find("failure"), case.find("skipped")
        if failure is None:
            failure = case.find("error")  # pytest's, outside a test
        if failure is not None:
            result["failed"][name] = failure.get("message", "")
        elif skipped is not None:
            # The message is the place in the source, then the reason.
            result["skipped"][name] = skipped.get("message", "").strip().splitlines()[-1]
        else:
            result["passed"] += 1
    return result


def rows_of(status: int, output: str, errors: str) -> dict[str, Any]:
    """Returns a benchmark's rows; for a failed one the rows until then, and the reason."""
    result: dict[str, Any] = {"exit": status, "ok": status == 0}
    if status == 0:
        try:
            return {**result, **json.loads(output)}
        except ValueError as error:
            errors += f"\nits output is no JSON: {error}"
    rows = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line.strip().rstrip(",")))
    rows = [row for row in rows if isinstance(row, dict) and "case" in row]
    return {**result, "ok": False, "rows": rows, "output": (output + errors)[-4000:]}
