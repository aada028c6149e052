"""Says in at most ten lines what a test run passed, failed and skipped, and why it skipped.

Usage: test_summary.py FOLDER, with the XML reports of GoogleTest and pytest (junitxml).
"""

from __future__ import annotations

import collections
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

LINES_OF_REASONS = 7


def outcome(case: ET.Element) -> tuple[str, str]:
    """Returns "passed", "failed" or "skipped" with the reason."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is not None:
        # GoogleTest puts the place before the reason, on a line of its own.
        lines = skipped.get("message", "").strip().splitlines()
        return "skipped", " ".join(lines[-1:]) or "no reason was given"
    if case.get("status") == "notrun":
        return "skipped", "it is disabled in its source"
    return "passed", ""


def main(folder: Path) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    for report in sorted(folder.glob("*.xml")):
        language = "Python" if report.name.startswith("python") else "C++"
        for case in ET.parse(report).iter("testcase"):
            kind, reason = outcome(case)
            counts[language][kind] += 1
            if reason:
                reasons[reason] += 1
    for language, count in counts.items():
        print(
            f"{language} test cases: {count['passed']} passed, {count['failed']} failed, "
            f"{count['skipped']} skipped"
        )
    common = reasons.most_common()
    for reason, number in common[:LINES_OF_REASONS]:
        print(f"  skipped {number}: {reason}")
    if rest := sum(number for _, number in common[LINES_OF_REASONS:]):
        print(f"  skipped {rest} for other reasons: see {folder}/*.xml")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
