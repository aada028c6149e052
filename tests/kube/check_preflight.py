"""Runs the preflight hook's script on definitions as operators ship them.

Usage: helm template … --set preflight.hook.enabled=true | check_preflight.py KEPT… -- DROPPED…

Both are files of CustomResourceDefinitions. Exit code 1, and what is wrong, unless the script
accepts those that keep the sidecar, and refuses each that drops it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import yaml

SCRIPT = Path(__file__).resolve().parents[2] / "helm" / "thalweg" / "files" / "preflight.py"


def arguments(chart: str) -> list[str]:
    """Returns the arguments that the hook's Job gives to the script."""
    for document in yaml.safe_load_all(chart):
        if document and document["kind"] == "Job":
            command = document["spec"]["template"]["spec"]["containers"][0]["command"]
            return [str(word) for word in command[2:]]
    raise ValueError("the chart has no Job: was preflight.hook.enabled set?")


def answer(paths: list[str], words: list[str]) -> int:
    """Returns the script's exit code in a cluster with the definitions of the files `paths`."""
    crds: dict[str, Any] = {}
    for path in paths:
        # The parser in C is used: these files have ten thousand lines.
        crd = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        crds[crd["metadata"]["name"]] = crd
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.definition = crds.get
    sys.argv = [str(SCRIPT), *words]
    with contextlib.redirect_stderr(io.StringIO()):
        return int(script.main())


def main() -> int:
    split = sys.argv.index("--")
    kept, dropped = sys.argv[1:split], sys.argv[split + 1 :]
    words = arguments(sys.stdin.read())
    known = {word.partition("=")[0] for word in words}
    wrong = []
    if len(known) != 2:
        wrong.append(f"the hook looks at {sorted(known)}, expected two definitions")
    if answer(kept, words) != 0:
        wrong.append(f"refused, though they keep the sidecar: {kept}")
    wrong += [
        f"accepted, though it drops the sidecar: {p}" for p in dropped if not answer([p], words)
    ]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
