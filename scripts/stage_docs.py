#!/usr/bin/env python3
"""Puts the pages of the documentation site, and what they link to, into a folder for mkdocs.

Usage: stage_docs.py FOLDER. Files keep their places in the repository, so that links hold. A folder
to which a page links gets a page that lists it. python.md is the reference of the public modules,
and cpp that of the installed headers; links to these headers lead there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cpp_reference
from check_links import lines_outside_code
from doxygen import public_headers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "client" / "python"
_LINK = re.compile(r"\]\(([^()\s#:]+)\)")
# Public modules that are programs, examples, or names of other packages.
_NO_API = {"cli", "compat", "examples", "timeline", "node"}


def public_modules() -> list[str]:
    """Returns the modules that users import, the package itself first."""
    package = PACKAGE / "thalweg"
    found = [path.stem for path in package.glob("*.py")]
    found += [path.parent.name for path in package.glob("*/__init__.py")]
    names = sorted(name for name in found if not name.startswith("_") and name not in _NO_API)
    return ["thalweg", *(f"thalweg.{name}" for name in names)]


def linked(page: Path) -> Iterator[Path]:
    """Yields the files and folders to which a page links, but for other pages and headers."""
    for _, line in lines_outside_code(page.read_text("utf-8")):
        for target in _LINK.findall(line):
            path = (page.parent / target).resolve()
            if path.suffix not in (".md", ".h") and path.exists():
                yield path.relative_to(ROOT)


def listing(folder: Path, names: list[str]) -> str:
    """Returns a page that lists the files of a folder; pages by their titles."""
    lines = [f"# {folder}", ""]
    for name in names:
        title = name
        if name.endswith(".md"):
            title = (ROOT / folder / name).read_text("utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({name})")
    return "\n".join(lines) + "\n"


def with_links_to_reference(page: Path) -> str:
    """Returns a page whose links to installed headers lead to the reference of these."""
    text = (ROOT / page).read_text("utf-8")
    for header in public_headers():
        up = "../" * (len(page.parts) - 1)
        text = text.replace(f"]({up}{header})", f"]({up}{cpp_reference.link_to(header)})")
    return text


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    done = subprocess.run([*command, *patterns], cwd=ROOT, capture_output=True, check=True)
    return [Path(name) for name in done.stdout.decode().split("\0") if name]


def stage(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    pages = tracked("*.md")
    files, folders = {*pages, *tracked("docs/*.css")}, set()
    for path in {path for page in pages for path in linked(ROOT / page)}:
        if (ROOT / path).is_dir():
            folders.add(path)
        else:
            files.add(path)
    for folder in folders:
        files.update(tracked(str(folder)))
    for path in files:
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy)
    for folder in folders - {page.parent for page in pages if page.name == "README.md"}:
        names = sorted(str(path.relative_to(folder)) for path in tracked(str(folder)))
        (target / folder / "index.md").write_text(listing(folder, names), "utf-8")
    for page in pages:
        (target / page).write_text(with_links_to_reference(page), "utf-8")
    cpp_reference.write(target)
    modules = (f"::: {name}\n" for name in public_modules())
    (target / "python.md").write_text("\n".join(["# Python\n", *modules]), "utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
