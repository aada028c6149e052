"""Tests jobs that torchrun starts on several hosts, with no aggregator and no change of code."""

import json
import os
import re
from pathlib import Path

import exact_training
import pytest
import torchrun

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

RESTARTING = ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "restarted"]
RESTARTING += ["--rdzv-endpoint", f"node0:{torchrun.PORT}"]

AMP_PAGE = Path(__file__).parents[2] / "docs" / "amp.md"


def assert_exact(ended):
    """Fails unless all hosts have trained to the weights that arithmetic gives, and are gone."""
    hosts, outputs = len(ended["hosts"]), torchrun.outputs_of(ended)
    assert [host["code"] for host in ended["hosts"]] == [0] * hosts, torchrun.ending(ended)
    told = [json.loads(line) for line in re.findall(r"\{.*\}", outputs)]
    assert sorted(t["rank"] for t in told) == list(range(hosts))
    assert {t["digest"] for t in told} == {told[0]["digest"]}
    assert told[0]["values"] == [exact_training.expected_weight(hosts)]
    assert ended["left"] == []


def test_one_variable_makes_three_hosts_train_through_their_own_sidecars(tmp_path):
    # Two hosts train with THALWEG_ENABLE below.
    ended = torchrun.run(tmp_path, {"AIAK_HIERARCHICAL_ALLREDUCE": "1"}, contained=True)
    assert_exact(ended)
    # The training went through Thalweg, with a shard in each sidecar.
    assert "3 shards, 3 of them in sidecars" in torchrun.outputs_of(ended)
    # No host's end took away a shard that others still needed.
    assert "[error]" not in torchrun.outputs_of(ended)


def test_one_line_of_a_script_is_enough_for_the_back_end_on_three_hosts(tmp_path):
    plain = Path(exact_training.__file__).read_text("utf-8")
    assert plain.count('init_process_group("gloo")') == 1
    script = tmp_path / "script.py"
    script.write_text(plain.replace('group("gloo")', 'group("thalweg")'), "utf-8")
    assert_exact(torchrun.run(tmp_path, {}, script=script, contained=True))


def test_aiak_script_of_the_documentation_runs_unchanged_on_three_hosts(tmp_path):
    page = AMP_PAGE.read_text("utf-8")
    [text] = re.findall(r"`aiak_script\.py`:\n\n```python\n(.*?)```", page, re.S)
    [variables] = re.findall(r"^(.*) torchrun .*aiak_script\.py$", page, re.M)
    script = tmp_path / "aiak_script.py"
    script.write_text(text, "utf-8")
    env = dict(variable.split("=") for variable in variables.split())
    ended = torchrun.run(tmp_path, env, script=script)
    outputs = torchrun.outputs_of(ended)
    assert [host["code"] for host in ended["hosts"]] == [0] * 3, torchrun.ending(ended)
    losses = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", outputs, re.M)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert "with codec fp16 and 3 shards, 3 of them in sidecars" in outputs
    assert ended["left"] == []


def test_job_that_torchrun_restarts_trains_exactly_with_new_shards(tmp_path):
    script = Path(__file__).with_name("restarted_training.py")
    env = {"THALWEG_ENABLE": "1"} | torchrun.OWN_STORES
    ended = torchrun.run(tmp_path, env, hosts=2, script=script, options=RESTARTING)
    assert_exact(ended)
    attached = re.findall(
        r"is attached as (job-\w+) .* 2 of them in sidecars", torchrun.outputs_of(ended)
    )
    assert len(attached) == len(set(attached)) == 2  # once in each attempt


def test_loopback_address_of_one_host_gives_way_to_its_route_to_the_others(tmp_path):
    env_of = [{}, {"THALWEG_INTERFACE": "lo"}]
    ended = torchrun.run(tmp_path, {"THALWEG_ENABLE": "1"}, hosts=2, env_of=env_of)
    assert_exact(ended)
    assert "2 shards, 2 of them in sidecars" in torchrun.outputs_of(ended)


def test_hosts_without_shards_are_refused_by_name_on_all_workers(tmp_path):
    ended = torchrun.run(tmp_path, {"THALWEG_ENABLE": "1", "THALWEG_LOCAL_SHARDS": "0"})
    for host in ended["hosts"]:
        assert host["code"] != 0
        assert "THALWEG_LOCAL_SHARDS" in host["output"]
