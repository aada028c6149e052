"""Writes the tables of docs/metrics.md: `metrics_doc.py FILE…`, each a server's /metrics page.

The tests of this folder have such pages and fail when the document differs; they say where the
pages are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# These labels have names of something in the program as values, not numbers or versions.
WORDS = (
    "certificate",
    "codec",
    "direction",
    "outcome",
    "path",
    "phase",
    "program",
    "reason",
    "role",
)

SECTIONS = {
    "thalweg_sidecar_": ("Sidecar", "These metrics describe the exchange of a node's gradients."),
    "thalweg_shard_": (
        "Aggregator shard",
        "A sidecar that contains an aggregator exports these as well.",
    ),
    "thalweg_grpc_": ("Network", "Both programs export these; `role` is the end of the streams."),
    "": ("Process", "Both programs export these."),
}
BEGIN, END = "<!-- generated: tables -->\n", "<!-- end -->\n"


@dataclass
class Family:
    kind: str = ""
    help: str = ""
    labels: dict[str, set[str]] = field(default_factory=dict)


def parse(text: str, families: dict[str, Family]) -> None:
    """Adds the descriptions of metrics on a /metrics page."""
    current = ""
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, current, rest = line.split(" ", 3)
            family = families.setdefault(current, Family())
            setattr(family, {"HELP": "help", "TYPE": "kind"}[what], rest)
        elif match := SAMPLE.match(line):
            for name, value in LABEL.findall(match[2] or ""):
                if name != "le":
                    families[current].labels.setdefault(name, set()).add(value)


def describe_labels(labels: dict[str, set[str]]) -> str:
    parts = []
    for name, values in sorted(labels.items()):
        known = f": {', '.join(sorted(values))}" if name in WORDS and name != "codec" else ""
        parts.append(f"`{name}`{known}")
    return "; ".join(parts)


def render(pages: Iterable[str], document: str) -> str:
    """Returns the document with new tables."""
    families: dict[str, Family] = {}
    for page in pages:
        parse(page, families)
    text = ""
    for prefix, (title, about) in SECTIONS.items():
        text += (
            f"\n## {title}\n\n{about}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        )
        for name in sorted(name for name in families if name.startswith(prefix)):
            family = families.pop(name)
            labels = describe_labels(family.labels)
            text += f"| `{name}` | {family.kind} | {labels} | {family.help} |\n"
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + text + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    contents = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    written = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(render(contents, written), encoding="utf-8")
