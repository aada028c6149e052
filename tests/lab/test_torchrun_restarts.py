"""Tests jobs of which torchrun restarts the workers again and again: docs/zero_code.md#restarts."""

import json
import os
import re

import killed_training
import pytest
import torchrun

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-id", "killed"]
RENDEZVOUS += ["--rdzv-endpoint", f"node0:{torchrun.PORT}"]
SECONDS = 120  # for an attempt at most, which takes a tenth where nothing else loads the cores


def lost_in(lines):
    """Returns how many steps each kill has cost."""
    lost, done = [], 0
    for line in lines:
        if "begins" in line:
            lost.append(done - line["begins"])
        done = line.get("done", line.get("begins", done))
    return lost[1:]


@pytest.mark.parametrize(
    ("kills", "every"),
    [
        (3, 5),
        pytest.param(20, 5, marks=pytest.mark.long),
        pytest.param(4, 50, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(SECONDS * 22)
def test_killed_job_ends_each_time_and_loses_no_more_than_the_steps_since_its_checkpoint(
    kills, every, tmp_path
):
    env = {"THALWEG_ENABLE": "1", "KILLS": str(kills), "EVERY": str(every)} | torchrun.OWN_STORES
    ended = torchrun.run(
        tmp_path,
        env,
        hosts=2,
        script=killed_training.__file__,
        options=["--max-restarts", str(kills), *RENDEZVOUS],
        seconds=SECONDS * (kills + 1),
    )
    assert [host["code"] for host in ended["hosts"]] == [0, 0], torchrun.ending(ended)
    output = torchrun.outputs_of(ended)
    lines = [json.loads(line) for line in re.findall(r"^.*?(\{.*\})$", output, re.MULTILINE)]
    lost = lost_in(lines)
    print(f"{kills} kills cost {lost} steps")
    assert len(lost) == kills
    assert max(lost) <= every
    assert lines[-1]["values"] == [killed_training.expected_weight(kills, every, 2)]
    attached = re.findall(r"is attached as (job-\w+) .* 2 of them in sidecars", output)
    assert len(attached) == len(set(attached)) == kills - kills // 4 + 1
    assert ended["left"] == []
