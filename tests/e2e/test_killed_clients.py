"""Kills a worker of each training library after a checkpoint; torchrun starts the workers again."""

from __future__ import annotations

import json

import launching
import pytest
from client_scripts import LONG, SCRIPTS, SECONDS, SHORT, VARIABLES


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("client", [*SHORT, *LONG])
def test_library_killed_under_torchrun_goes_on_compressed_as_if_undisturbed(client, tmp_path):
    folder = {"THALWEG_RESIDUALS": str(tmp_path / "residuals")}
    output = launching.run(
        lambda node, port: launching.torchrun_restarting(node, port, restarts=1),
        [str(SCRIPTS / f"{client}.py"), "killed", str(tmp_path)],
        tmp_path,
        VARIABLES | launching.STORES | folder,
        seconds=SECONDS,
    )
    assert (tmp_path / "died").exists()
    # Once before the kill, and once after it.
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 2
    assert output.count("what nodes held back of gradients goes on, from files") == 2
    found = [json.loads((tmp_path / f"killed{rank}.json").read_text()) for rank in (0, 1)]
    for worker in found:
        assert 0 < worker["resumes"]["sent"] < worker["resumes"]["raw"] / 2  # both steps
        assert worker["resumes"]["digest"] == worker["whole"]["digest"]
    assert found[0]["whole"]["digest"] == found[1]["whole"]["digest"]
