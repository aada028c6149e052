"""Runs Thalweg's side of `thalweg bench codec`: the program thalweg-codec-rounds of a build."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import Shape

PROGRAM = "thalweg-codec-rounds"
_DEADLINE = 60.0  # of one round

Round = tuple[float, float]  # seconds of the round, and of copying the gradients


@contextlib.contextmanager
def running(
    program: Path, codec: str, shapes: list[Shape], threads: int
) -> Iterator[Callable[[], Round]]:
    """Runs the program, which waits between rounds; gives what runs a round, or raises BenchError.

    The program checks the first round's result.
    """
    argv, pipe = [str(program.resolve()), codec, str(threads)], subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the program has ended: see its answer
            stdin.write(text)
            stdin.flush()

    def run_round() -> Round:
        ask("round\n")
        if not select.select([stdout], [], [], _DEADLINE)[0]:
            raise BenchError(f"{PROGRAM} did not end a round within {_DEADLINE:g} s")
        line = stdout.readline()
        return parse(line) if line else _fail(process)

    try:
        ask("".join("x".join(map(str, shape)) + "\n" for shape in shapes) + "\n")
        yield run_round
    finally:
        process.kill()
        process.communicate()  # closes the pipes, also one that is broken


def _fail(process: subprocess.Popen[str]) -> Round:
    assert process.stderr is not None
    text = process.stderr.read().strip()
    raise BenchError(f"{PROGRAM} ended with {process.wait(_DEADLINE)}: {text}")


def parse(line: str) -> Round:
    try:
        found = json.loads(line)
        return float(found["seconds"]), float(found["copy_seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{PROGRAM} answered {line!r}, expected seconds and copy_seconds as JSON"
        ) from error
