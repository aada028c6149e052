"""Runs Thalweg's side of `thalweg bench codec`: the program thalweg-codec-rounds of a build."""

from __future__ import annotations

import json
import os
import select
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import Shape

PROGRAM = "thalweg-codec-rounds"
_DEADLINE = 60.0  # of one round


@dataclass(frozen=True)
class Round:
    seconds: float
    copy_seconds: float  # for copying the gradients


def find_program(folder: Path) -> Path | None:
    """Returns the first one below `folder`."""
    found = sorted(p for p in folder.rglob(PROGRAM) if p.is_file() and os.access(p, os.X_OK))
    return found[0] if found else None


class CodecRounds:
    """Runs the program from __enter__() to __exit__(); it waits between rounds. One thread only."""

    def __init__(self, program: Path, codec: str, shapes: list[Shape], threads: int) -> None:
        self._argv = [str(program.resolve()), codec, str(threads)]
        self._shapes = "".join("x".join(map(str, shape)) + "\n" for shape in shapes) + "\n"

    def __enter__(self) -> CodecRounds:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._send(self._shapes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self) -> Round:
        """Runs a round. Raises BenchError; the program checks the first round's result."""
        self._send("round\n")
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _DEADLINE)[0]:
            raise BenchError(f"{PROGRAM} did not end a round within {_DEADLINE:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return parse(line)

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _failure(self) -> BenchError:
        code = self._process.wait(_DEADLINE)
        assert self._process.stderr is not None
        return BenchError(f"{PROGRAM} ended with {code}: {self._process.stderr.read().strip()}")


def parse(line: str) -> Round:
    try:
        found = json.loads(line)
        return Round(float(found["seconds"]), float(found["copy_seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{PROGRAM} answered {line!r}, expected seconds and copy_seconds as JSON"
        ) from error
