"""Starts processes of one Gloo group for tests that need more than one."""

import json
import subprocess
import sys
from pathlib import Path

from amp_models import script_environment


def run_workers(name: str, number: int, folder: Path, *, timeout: float, **variables: str) -> list:
    """Returns what each worker, `name` beside this file, has printed as JSON in its last line.

    Workers get their rank and the path of a common store; `timeout` is in seconds.
    """
    store = folder / "store"
    workers = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parent / name, str(rank), store],
            env=script_environment() | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    try:
        said = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * number
    return [json.loads(text.splitlines()[-1]) for text in said]
