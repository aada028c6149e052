#!/usr/bin/env python3
"""Checks that every relative link, image and anchor in the given Markdown files resolves.

Usage: check_links.py FILE… . In files that are not Markdown, only mentions of a page such as
docs/amp.md are checked. Exits 1 after printing each broken reference as FILE:LINE.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_MENTION = re.compile(r"\b(?:docs|deploy)/[\w/-]+\.md\b")
_ELSEWHERE = re.compile(r"[a-z]+:")


def lines_outside_code(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number and text of each line that is not in a fenced block."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def make_anchor(heading: str) -> str:
    """Returns the anchor that GitHub and GitLab give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def find_anchors(path: Path) -> frozenset[str]:
    headings = [
        make_anchor(line.lstrip("#"))
        for _, line in lines_outside_code(path.read_text(encoding="utf-8"))
        if re.match(r"#{1,6} ", line)
    ]
    counts: Counter[str] = Counter()
    anchors = set()
    for heading in headings:
        anchors.add(f"{heading}-{counts[heading]}" if counts[heading] else heading)
        counts[heading] += 1
    return frozenset(anchors)


def check_link(page: Path, target: str) -> str | None:
    """Returns what is wrong with a link of `page`, or None."""
    name, _, anchor = target.partition("#")
    found = (page.parent / name).resolve() if name else page
    if not found.exists():
        return f"'{target}' does not exist"
    if anchor and anchor not in find_anchors(found):
        return f"'{target}': {found.name} has no such heading"
    return None


def check_file(path: Path) -> Iterator[str]:
    """Yields one message for each broken reference."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for number, line in lines_outside_code(text):
            for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if _ELSEWHERE.match(target):
                    continue
                problem = check_link(path, target)
                if problem:
                    yield f"{path.relative_to(_ROOT)}:{number}: {problem}"
        return
    for number, line in enumerate(text.splitlines(), 1):
        for mention in _MENTION.findall(line):
            # scripts/stage_docs.py makes the index of a folder.
            if not mention.endswith("/index.md") and not (_ROOT / mention).is_file():
                yield f"{path.relative_to(_ROOT)}:{number}: '{mention}' does not exist"


def main() -> int:
    paths = [(_ROOT / name).resolve() for name in sys.argv[1:]]
    problems = [problem for path in paths for problem in check_file(path)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
