"""Runs the script of docs/tutorial.md with the commands of the page, and compares the outputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE, environment, servers

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text("utf-8")
[SCRIPT] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
STEPS = re.findall(r"^```sh\n(.*?)\n```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
NUMBER = r"\d+(?:\\?\.\d+)?(?:e-\d+)?"
BYTES = re.compile(r"[\d.]+ MB of gradients crossed a node's link as [\d.]+ MB \([\d.]+x less\)")


def pattern(line):
    """Returns what matches a line of the page: other numbers may stand in it, and more at …"""
    text = re.sub(r"(?:\\ )+", " +", re.escape(line)).replace("…", ".*")
    return re.sub(NUMBER, "[0-9.e-]+", text)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Returns what each command has printed; they run one after the other in one folder."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "train.py").write_text(SCRIPT, "utf-8")
    found = []
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for command, _ in STEPS:
            done = subprocess.run(
                command,
                shell=True,
                env=env,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            found.append(done.stdout + done.stderr)
        for left in nothing.folder.glob("torchelastic_*"):  # not ours
            shutil.rmtree(left)
    return found


@pytest.mark.timeout(300)
def test_commands_of_the_tutorial_print_what_the_page_shows(outputs):
    assert len(STEPS) == 4
    for (_, shown), output in zip(STEPS, outputs, strict=True):
        for line in shown.splitlines():
            assert re.search(pattern(line), output), f"{line}\nis not in\n{output}"
        # Bytes are the same on every machine.
        assert BYTES.findall(shown) == BYTES.findall(output)


@pytest.mark.timeout(300)
def test_losses_of_the_tutorial_fall_and_go_on_from_the_checkpoint(outputs):
    losses = [[float(x) for x in re.findall(r"step \d+: loss (\S+)", text)] for text in outputs]
    plain, halved, (*beside, _, _, compressed), [resumed] = losses
    assert beside == plain
    assert plain[-1] < plain[0] / 2
    # fp16 changes a gradient by 2^-11 of itself at most, and so the way down by as much in each
    # step: 60 * 2^-11 of a loss of 0.035 are 0.001. The rounding to three digits is 0.001 at most.
    assert halved[-1] == pytest.approx(plain[-1], abs=0.002)
    assert compressed < plain[0] / 2
    assert resumed < compressed
