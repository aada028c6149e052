"""Tests modules that are attached to process groups of the back end "thalweg": one job for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import on_nodes
import pytest
from harness import Job, servers

JOBS = Path(__file__).parent / "attached_group_jobs.py"
ONE_NODE, TWO_NODES = (2,), (1, 1)


def run(
    name: str, tmp_path: Path, nodes: tuple[int, ...], env: dict[str, str]
) -> tuple[list[Any], str]:
    """Returns what the workers of such a job return, and what they have said."""
    env = {"THALWEG_STEP_TIMEOUT": "auto"} | env  # the group's
    return on_nodes.outputs(JOBS, name, tmp_path, nodes, **env)


@pytest.mark.parametrize(
    ("nodes", "attach", "codec"),
    [
        (ONE_NODE, "script", "fp32"),
        (TWO_NODES, "script", "fp16"),
        (TWO_NODES, "script", ""),
        (TWO_NODES, "environment", "powersgd:rank=2,start=2"),
    ],
)
def test_module_joins_the_job_of_its_group_and_trains_as_on_gloo(nodes, attach, codec, tmp_path):
    env = {"ATTACH": attach} | ({"THALWEG_CODEC": codec} if codec else {})
    results, said = run("trained_like_gloo", tmp_path, nodes, env)
    assert len({result["ours"] for result in results}) == 1
    for result in results:
        assert result["jobs"] == 1
        assert result["ours"] == result["theirs"] != result["untrained"]
        assert result["rounds"] >= 3
        assert (result["compression"] > 1) == (codec not in ("", "fp32"))
        status, error = result["after"]
        assert "the session was closed" in status
        assert "the session was closed" in error
    assert "a job of its own" not in said


def test_what_the_groups_session_cannot_take_gets_a_job_of_its_own_and_says_why(tmp_path):
    results, said = run("other_settings", tmp_path, ONE_NODE, {})
    for result in results:
        assert result["jobs"] == result["names"] == 3
        assert result["trained"] == 1
        assert result["sum"] == [2.0] * 3
        assert result["closed"][0] is True
    assert results[0]["closed"] == results[1]["closed"]
    assert "codec is bf16 but was fp32 in init_process_group(): set THALWEG_CODEC before" in said
    assert "another module is attached to it already" in said


def test_module_joins_the_job_of_a_group_that_torch_debugs_in_detail(tmp_path):
    results, _ = run("attached", tmp_path, ONE_NODE, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert results == [1, 1]


@pytest.mark.parametrize("nodes", [(2, 2), (4,)])
def test_groups_beside_gloos_default_group_are_jobs_of_their_own(nodes, tmp_path):
    results, said = run("groups_beside_gloo", tmp_path, nodes, {})
    for rank, result in enumerate(results):
        is_last = rank >= 2
        assert result["sums"] == [[6.0, 40.0], [5.0, 20.0] if is_last else [rank, 10.0]]
        assert result["broadcast"] == [3.0 if is_last else rank, 10.0]
        assert result["jobs"] == (2 if is_last or len(nodes) == 1 else 1)
        assert result["ours"] == result["theirs"]
        assert "the session was closed" in result["after"]
        assert result["left behind"] <= 0
    assert "a job of its own" not in said


def test_process_that_never_destroys_its_group_leaves_the_job_at_its_end(tmp_path):
    with servers() as cluster:
        there = cluster.add_sidecar("--shard-listen", "127.0.0.1:0", aggregators="")
        sidecars = ["", there.address]  # rank 0 starts its own, and waits for its end
        env = {"THALWEG_TIMEOUT": "60"}  # which limits that wait
        job = Job("never_destroyed", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        assert len(set(job.results())) == 1
    assert "other nodes have not left" not in job.output
