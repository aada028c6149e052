"""Runs the first trial of README.md: its command without code, with the script that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import DEADLINE, environment, servers

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
TRAINS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(8, 784)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_first_trial_halves_the_bytes_and_warns_of_nothing(tmp_path):
    [shown] = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    [command] = re.findall(r"^(thalweg run .*? plain_ddp\.py)\b", README, re.M)
    plain, attached = re.subn(r"^state = .*\n", "", shown.replace(", thalweg.ddp", ""), flags=re.M)
    assert attached == 1  # the rest is plain torch
    trained = re.sub(r"^\.\.\..*\n", TRAINS, plain, flags=re.M).partition("print(")[0]
    (tmp_path / "plain_ddp.py").write_text(trained, "utf-8")
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command.split(), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE
        )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "(2.00x less)" in output, output
    assert not re.search(r"\b(warn|warning|error)\b", output, re.I), output
