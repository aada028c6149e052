"""Kills a worker of each training library after a checkpoint; torchrun starts the workers again."""

from __future__ import annotations

import json

import launching
import pytest
from test_clients import LONG, SCRIPTS, SECONDS, SHORT, VARIABLES

# These keep files of what nodes hold back.
WITH_FILES = ["accelerated", "lightning_training", "timm_training", "trainer"]


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("client", [*SHORT, *LONG])
def test_library_killed_under_torchrun_goes_on_from_its_checkpoint_compressed(client, tmp_path):
    folder = {"THALWEG_RESIDUALS": str(tmp_path / "residuals")} if client in WITH_FILES else {}
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
    expected = 2 if folder else 0
    assert output.count("what nodes held back of gradients goes on, from files") == expected
    found = [json.loads((tmp_path / f"killed{rank}.json").read_text()) for rank in (0, 1)]
    for worker in found:
        assert 0 < worker["resumes"]["sent"] < worker["resumes"]["raw"] / 2  # both steps
    assert found[0]["resumes"]["digest"] == found[1]["resumes"]["digest"]
