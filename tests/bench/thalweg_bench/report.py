"""Generates the blocks of docs/measurements/performance.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from thalweg._settings._config import ConfigError
from thalweg_bench import reach
from thalweg_bench.results import Results
from thalweg_bench.rows import HEADINGS, Row, make_cells
from thalweg_bench.suite_cases import MICRO

_MARK = re.compile(r"^<!-- (?:generated: (?P<name>\S+)|(?P<end>end)) -->$", re.MULTILINE)
_MET = {True: "yes", False: "**no**", None: "-"}


def make_blocks(results: Results) -> dict[str, str]:
    """Returns the blocks by name. Equal results give equal text."""
    return {
        "reach": _reach(results),
        "rows": _rows(results),
        "resources": _resources(results),
        "micro": micro_table(results.rows.get(MICRO, ())),
        "machine": _machine(results),
    }


def fill_file(path: Path, results: Results) -> None:
    """Fills the file. Raises ConfigError unless it has exactly these blocks."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown {path} cannot be read: {error.strerror}") from None
    path.write_text(fill(text, make_blocks(results), str(path)), encoding="utf-8")


def fill(text: str, blocks: dict[str, str], where: str) -> str:
    """Returns `text` with new contents between its marks. Raises ConfigError."""
    found = list(_find_blocks(text, where))
    names = [name for name, _, _ in found]
    for name in names:
        if name not in blocks:
            raise ConfigError(
                f"{where} has a block '{name}', which nothing generates: known are "
                f"{', '.join(blocks)}"
            )
    for name in blocks:
        if names.count(name) != 1:
            raise ConfigError(
                f"{where} has {names.count(name)} blocks '<!-- generated: {name} -->', "
                "expected one, with '<!-- end -->' behind it"
            )
    parts, position = [], 0
    for name, begin, end in found:
        parts += [text[position:begin], "\n", blocks[name], "\n"]
        position = end
    return "".join([*parts, text[position:]])


def _find_blocks(text: str, where: str) -> Iterable[tuple[str, int, int]]:
    """Yields name, end of the opening mark, begin of the closing one."""
    name, begin = "", 0
    for mark in _MARK.finditer(text):
        line = text.count("\n", 0, mark.start()) + 1
        if bool(mark["end"]) != bool(name):
            expected = f"'<!-- end -->' of '{name}'" if name else "'<!-- generated: NAME -->'"
            raise ConfigError(f"{where}:{line}: expected {expected}, got '{mark[0]}'")
        if mark["end"]:
            yield name, begin, mark.start()
            name = ""
        else:
            name, begin = mark["name"], mark.end()
    if name:
        raise ConfigError(f"{where}: the block '{name}' has no '<!-- end -->'")


def _reach(results: Results) -> str:
    lines = []
    for target in reach.targets():
        measured = target.measure(results)
        if measured is None:
            lines.append((target.case, target.target, "not measured", "-"))
        else:
            lines.append((target.case, target.target, measured.text, _MET[measured.met]))
    return make_table(("case", "target", "measured", "met"), lines)


def _rows(results: Results) -> str:
    lines = []
    for name, rows in results.rows.items():
        if name != MICRO:
            lines += [(name, *cells) for cells in make_cells(rows)]
    return make_table(("suite case", *HEADINGS), lines, left=3)


def _resources(results: Results) -> str:
    lines = [
        (
            name,
            str(entry["case"]),
            str(entry["process"]),
            f"{entry['cpu_s_per_gb']:.3f}",
            f"{entry['rss_mb']:.1f}",
            "-" if entry["sent_mb"] is None else f"{entry['sent_mb']:.3f}",
        )
        for name, entries in results.resources.items()
        for entry in entries
    ]
    headings = ("suite case", "case", "process", "CPU-s per GB", "MB resident", "MB sent")
    return make_table(headings, lines, left=3)


def micro_table(rows: Sequence[Row]) -> str:
    lines = [
        (
            row.case,
            str(row.bytes) if row.bytes else "-",
            f"{row.median_s * 1e6:.3f}",
            f"{row.min_s * 1e6:.3f}",
            f"{row.max_s * 1e6:.3f}",
            f"{row.bytes / row.median_s / 1e9:.2f}" if row.bytes else "-",
        )
        for row in rows
    ]
    return make_table(("benchmark", "bytes", "median µs", "min", "max", "GB/s"), lines, left=1)


def _machine(results: Results) -> str:
    machine, cases = results.machine, results.machine["cases"]
    about = [f"- {key}: {value}" for key, value in machine.items() if key != "cases" and value]
    lines = [
        (name, "<br>".join(f"`{c}`" for c in case["commands"]), case["date"], str(case["seconds"]))
        for name, case in sorted(cases.items(), key=lambda item: _order(results, item[0]))
    ]
    headings = ("suite case", "commands", "measured", "seconds")
    return "\n".join([*about, "", make_table(headings, lines, left=3)])


def _order(results: Results, name: str) -> tuple[int, str]:
    names = list(results.rows)
    return (names.index(name) if name in names else len(names), name)


def make_table(headings: Sequence[str], lines: Iterable[Sequence[str]], left: int = 4) -> str:
    """Formats a table; the first `left` columns are words."""
    rule = ["---" if index < left else "---:" for index in range(len(headings))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))
