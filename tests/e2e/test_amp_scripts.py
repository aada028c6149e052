"""Runs the apex script and the AIAK script of docs/amp.md with the command lines given there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE, environment, servers

PAGE = (Path(__file__).parents[2] / "docs" / "amp.md").read_text("utf-8")
SECTION = r"^## An (?:apex|AIAK) script, unchanged$.*?(?=^## )"
SECTIONS = "".join(re.findall(SECTION, PAGE, re.M | re.S))
SCRIPTS = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", SECTIONS, re.S)
COMMANDS = re.findall(r"```sh\n(.*?)\n```", SECTIONS)


def test_each_script_has_its_command():
    assert [name for name, _ in SCRIPTS] == ["apex_script.py", "aiak_script.py"]
    assert [command.split()[-1] for command in COMMANDS] == ["apex_script.py", "aiak_script.py"]


@pytest.mark.parametrize("number", [0, 1])
def test_script_runs_unchanged_and_learns(number, tmp_path):
    name, text = SCRIPTS[number]
    (tmp_path / name).write_text(text, "utf-8")
    words = shlex.split(COMMANDS[number])
    start = words.index("torchrun")
    variables = dict(word.split("=") for word in words[:start])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        result = subprocess.run(
            [*launcher, *words[start + 1 :]],
            env=env | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        for folder in nothing.folder.glob("torchelastic_*"):  # not ours
            shutil.rmtree(folder)
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", result.stdout, re.M)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    said = [line for line in result.stderr.splitlines() if "is attached as job-" in line]
    assert len(said) == 1
    assert "with codec fp16" in said[0]
