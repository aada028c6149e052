"""Counts the cases in a folder of GoogleTest XML reports and names every skip with its reason."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(folder: Path) -> None:
    cases = 0
    skips = []
    for report in sorted(folder.glob("*.xml")):
        for case in ET.parse(report).iter("testcase"):
            cases += 1
            name = f"{case.get('classname')}.{case.get('name')}"
            skipped = case.find("skipped")
            if skipped is not None:
                reason = " ".join(skipped.get("message", "").split())
                skips.append(f"  skipped {name}: {reason}")
            elif case.get("status") == "notrun":
                skips.append(f"  skipped {name}: disabled in its source")
    print(f"C++ test cases: {cases - len(skips)} run, {len(skips)} skipped")
    for skip in skips:
        print(skip)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
