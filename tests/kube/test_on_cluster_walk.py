"""Runs the commands of docs/cce.md, in their order, on a real cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import BIN, ROOT
from release import needs_cluster, with_small_requests
from rendered import HELM

pytestmark = [needs_cluster, pytest.mark.alone, pytest.mark.timeout(900)]
PAGE = ROOT / "docs" / "cce.md"


def commands() -> list[str]:
    """Returns the blocks of the page that are commands to run."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def checkout(folder: Path) -> Path:
    """Copies what the commands use, with requests that fit this machine."""
    for name in ("deploy", "helm"):
        shutil.copytree(ROOT / name, folder / name)
    for path in [*folder.glob("deploy/jobs/*.yaml"), folder / "helm" / "thalweg" / "values.yaml"]:
        text = with_small_requests(path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    return folder


def test_commands_of_the_page_train_a_job(cluster, tmp_path):
    folders = [BIN, HELM.parent, Path(sys.executable).parent]
    env = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "registry": "localhost"}
    env["PATH"] = ":".join([*map(str, folders), os.environ["PATH"]])
    where = checkout(tmp_path)
    said = ""
    for block in commands():
        argv = ["bash", "-xeuo", "pipefail", "-c", block]
        ran = subprocess.run(
            argv, env=env, cwd=where, capture_output=True, text=True, timeout=700, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said += ran.stdout
    assert len(re.findall(r"thalweg-aggregator-\d +1/1 +Running", said)) == 2
    assert re.search(r"TEST SUITE: +thalweg-test\n.*\n.*\nPhase: +Succeeded", said), said
    assert "with codec powersgd:rank=4" in said
    assert "2 replicas are bit-identical" in said
