"""Builds, installs and uses the example back end of docs/c10d.md."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "c10d_backend"


def run(*arguments: str, seconds: int, cwd: Path | None = None, **variables: str) -> str:
    """Returns what a Python program says on standard output; it must succeed."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_example_is_installed_found_by_torch_and_reduces_between_two_ranks(tmp_path):
    source, installed = tmp_path / "source", str(tmp_path / "installed")
    shutil.copytree(EXAMPLE, source)
    Path(installed).mkdir()
    # What `pip install` does, but for a wheel, whose package an environment may lack.
    run(
        *("setup.py", "build", "--build-lib", installed, "egg_info", "--egg-base", installed),
        cwd=source,
        seconds=800,
        MAX_JOBS="1",
    )
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2"
    said = run(*launch.split(), str(source / "try_it.py"), seconds=90, PYTHONPATH=installed)
    # torchrun's workers are unbuffered: both may write into one line.
    what = r"rank (\d) of 2: sums and copies are right; refused: .*?does not support allgather"
    assert sorted(re.findall(what, said)) == ["0", "1"]
