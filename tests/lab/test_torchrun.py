"""Tests jobs that torchrun starts on several hosts, with no aggregator and no change of code."""

import json
import os
import re
import subprocess
import sys

import exact_training
import pytest
import torchrun

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def run(folder, **settings):
    """Returns each host's exit code and output."""
    out = folder / "ended.json"
    argv = [sys.executable, torchrun.__file__, str(out)]
    argv += [f"{name}={value}" for name, value in settings.items()]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


def expected_weight():
    """The value of every weight after training, which fp32 represents exactly."""
    world, rate = torchrun.HOSTS, exact_training.RATE
    steps = range(exact_training.STEPS)
    gradients = [exact_training.gradient(r, world, s) for s in steps for r in range(world)]
    return -rate * sum(gradients) / world


@pytest.mark.parametrize("variable", ["THALWEG_ENABLE", "AIAK_HIERARCHICAL_ALLREDUCE"])
def test_one_variable_makes_three_hosts_train_through_their_own_sidecars(tmp_path, variable):
    ended = run(tmp_path, **{variable: "1"})
    outputs = "\n".join(host["output"] for host in ended)
    assert [host["code"] for host in ended] == [0] * torchrun.HOSTS, outputs
    told = [json.loads(line) for line in re.findall(r"\{.*\}", outputs)]
    assert sorted(t["rank"] for t in told) == list(range(torchrun.HOSTS))
    assert {t["digest"] for t in told} == {told[0]["digest"]}
    assert told[0]["values"] == [expected_weight()]
    # The training went through Thalweg, with a shard in each sidecar.
    assert "3 shards, 3 of them in sidecars" in outputs
    assert "[error]" not in outputs


def test_hosts_without_shards_are_refused_by_name_on_all_workers(tmp_path):
    ended = run(tmp_path, THALWEG_ENABLE="1", THALWEG_LOCAL_SHARDS="0")
    for host in ended:
        assert host["code"] != 0
        assert "THALWEG_LOCAL_SHARDS" in host["output"]
