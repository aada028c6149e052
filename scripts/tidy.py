"""Runs clang-tidy over sources of a build, except those that passed before in the same state.

A source's state is its compile command, .clang-tidy, clang-tidy's version, and the contents of all
files that it includes, which the build recorded; in a unity build those of a few sources together.
Sources that a unity build compiles together are checked together, which reads their headers once.
States that passed are kept in .cache/clang-tidy.
Usage: tidy.py BUILD_FOLDER SOURCE…; exit code 1 if clang-tidy finds anything.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CACHE = Path(".cache/clang-tidy")


def run(*argv: str, cwd: Path | None = None) -> str:
    return subprocess.run(argv, cwd=cwd, check=True, capture_output=True, text=True).stdout


# GCC's precompiled headers mean nothing to Clang.
PRECOMPILED = re.compile(r" -Winvalid-pch -include \S+/cmake_pch\.hxx")


def unity_of(file: str) -> list[str]:
    """Returns the sources that a unity build compiles as this file; none of other files."""
    if Path(file).parent.name != "Unity":
        return []
    return re.findall(r'^#include "(.*)"$', Path(file).read_text(), re.MULTILINE)


def commands(build: Path) -> list[dict[str, str]]:
    """Returns the compilation database with an entry for each source, also in a unity build."""
    result = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = entry["file"]
        for source in [file, *unity_of(file)]:
            command = PRECOMPILED.sub("", entry["command"].replace(file, source))
            result.append(entry | {"file": source, "command": command})
    return result


def together(database: list[dict[str, str]], due: set[Path]) -> list[tuple[Path, list[Path]]]:
    """Returns what clang-tidy is to read, each with the sources that it contains: files of a unity
    build whose sources are all due, and the other sources themselves.
    """
    groups = [(Path(entry["file"]), unity_of(entry["file"])) for entry in database]
    result = []
    for unity, names in groups:
        sources = [Path(name) for name in names]
        if sources and due.issuperset(sources):
            result.append((unity, sources))
            due = due.difference(sources)
    return [*result, *((source, [source]) for source in sorted(due))]


def dependencies(build: Path) -> dict[str, list[Path]]:
    """Returns the files that each object file was made from, by the object's path in the build."""
    files: dict[str, list[Path]] = {}
    current: list[Path] = []
    for line in run("ninja", "-t", "deps", cwd=build).splitlines():
        if line.startswith("    "):
            current.append(build / line.strip())
        elif line:
            current = files.setdefault(line.partition(":")[0], [])
    return files


@functools.cache
def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def state(command: str, files: list[Path], tool: bytes) -> str:
    result = hashlib.sha256(tool)
    # Where the checkout is does not matter.
    result.update(command.replace(str(Path.cwd()), ".").encode())
    for path in files:
        result.update(digest(path))
    return result.hexdigest()


def check(file: Path, keys: list[str]) -> bool:
    """Returns whether clang-tidy is content with the file, and prints what it finds."""
    argv = ["clang-tidy", "-p", str(CACHE), "--quiet", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode == 0 and not done.stdout.strip():
        for key in filter(None, keys):
            (CACHE / key).touch()
        return True
    print(done.stdout + done.stderr, end="", flush=True)
    return False


def main(build: Path, sources: list[Path]) -> int:
    CACHE.mkdir(parents=True, exist_ok=True)
    tool = run("clang-tidy", "--version").encode() + Path(".clang-tidy").read_bytes()
    database, files = commands(build), dependencies(build)
    (CACHE / "compile_commands.json").write_text(json.dumps(database))
    known = {Path(entry["file"]): (entry["output"], entry["command"]) for entry in database}
    keys = {}
    for source in sources:
        if source not in known:
            print(f"{source}: the build in {build} does not compile it", file=sys.stderr)
            return 1
        output, command = known[source]
        # Without recorded dependencies (the object was never built) the source is checked anew.
        keys[source] = state(command, files[output], tool) if files.get(output) else ""
    due = {source for source, key in keys.items() if not key or not (CACHE / key).exists()}
    print(f"clang-tidy: {len(sources) - len(due)} files have passed before, {len(due)} to check")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(
            lambda item: check(item[0], [keys[source] for source in item[1]]),
            together(database, due),
        )
        return 0 if all(list(passed)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), [Path(each).resolve() for each in sys.argv[2:]]))
