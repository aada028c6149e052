"""Lets Doxygen read the C++ headers that the package installs: cmake/public_headers.txt names them.

Their comments begin with `//`, which Doxygen takes for none: it is given copies.
"""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SETTINGS = """
QUIET = YES
WARN_AS_ERROR = FAIL_ON_WARNINGS
WARN_IF_UNDOCUMENTED = NO
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
EXTRACT_ALL = YES
MACRO_EXPANSION = YES
INCLUDE_PATH = .
PREDEFINED = ABSL_LOCKABLE= ABSL_SCOPED_LOCKABLE= ABSL_EXCLUSIVE_LOCK_FUNCTION(x)= \\
  ABSL_UNLOCK_FUNCTION()= ABSL_EXCLUSIVE_LOCKS_REQUIRED(x)= ABSL_NO_THREAD_SAFETY_ANALYSIS= \\
  ABSL_GUARDED_BY(x)=
"""


def public_headers() -> list[str]:
    return (ROOT / "cmake" / "public_headers.txt").read_text("utf-8").split()


def for_doxygen(text: str) -> str:
    """Returns a header whose comments are Doxygen's: `///` before what they say, `///<` after it.

    A comment that begins below one at the end of a line continues that one. Lines of a comment that
    are indented are shown as they are.
    """
    lines = ["/// \\file"] if text.startswith("//") else []
    column = None
    for line in text.splitlines():
        alone = re.fullmatch(r"( *)//(.*)", line)
        ending = re.fullmatch(r"(.*\S +)// (.*)", line)
        if alone and column == len(alone[1]):
            lines.append(f"{alone[1]}///<{alone[2]}")
            continue
        column = len(ending[1]) if ending else None
        if alone:
            indent = "    " if alone[2].startswith("   ") else ""
            lines.append(f"{alone[1]}///{indent}{alone[2]}")
        else:
            lines.append(f"{ending[1]}///< {ending[2]}" if ending else line)
    return "\n".join(lines) + "\n"


def run_doxygen(folder: Path) -> dict[str, ET.Element]:
    """Returns what Doxygen says of the headers: its compounds, by their numbers."""
    for header in public_headers():
        copy = folder / "headers" / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(for_doxygen((ROOT / header).read_text("utf-8")), "utf-8")
    settings = f"{_SETTINGS}INPUT = {' '.join(public_headers())}\nOUTPUT_DIRECTORY = {folder}\n"
    subprocess.run(["doxygen", "-"], cwd=folder / "headers", input=settings, text=True, check=True)
    found = {}
    for path in (folder / "xml").glob("*.xml"):
        for compound in ET.parse(path).iter("compounddef"):
            found[compound.attrib["id"]] = compound
    return found
