"""Tests workers that reduce inside their node in real jobs: one session for each node."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness import Job, Servers, servers

JOBS = Path(__file__).parent / "node_jobs.py"
# Workers that do not notice that a connection ends hear of it when this is over. Those that do need
# seconds on a busy machine.
PATIENCE = {"THALWEG_TIMEOUT": "60", "THALWEG_STEP_TIMEOUT": "60"}
AT_ONCE = 30.0


def start(
    name: str,
    cluster: Servers,
    tmp_path: Path,
    nodes: list[int],
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Starts a job; `nodes` gives the node of each worker."""
    sockets = [cluster.sidecars[node].address for node in nodes]
    return Job(name, cluster, tmp_path, sidecar_of=sockets, env=variables, jobs=JOBS)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> list[dict]:
    """Returns the results of the two workers of each of two nodes."""
    with servers(nodes=2, shards=1) as cluster:
        return start("all_modes", cluster, tmp_path_factory.mktemp("job"), [0, 0, 1, 1]).results()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
def test_all_workers_get_the_mean_and_the_same_bits(dtype, two_nodes):
    results = [result["means"][dtype] for result in two_nodes]
    assert len({result["bits"] for result in results}) == 1
    for leader in (0, 2):
        assert results[leader]["stats"] == results[leader + 1]["stats"]
    for result in results:
        assert result["excess"] <= 1
        assert result["status"] is None
        assert result["path"] == "workers (cpu)"
        assert "path: workers (cpu)" in result["summary"]
        assert "the session was closed" in result["closed"]
        # The statistics count every worker's gradient, and each node's once: nothing is compressed.
        assert result["stats"]["raw_bytes"] == result["bytes"]
        assert result["stats"]["wire_bytes_sent"] == result["bytes"]
        assert result["stats"]["workers"] == 4


def test_module_can_be_copied_and_saved_and_its_copy_has_no_hook(tmp_path):
    with servers(nodes=1, shards=1) as cluster:
        results = start("copied", cluster, tmp_path, [0, 0]).results()
    assert results[0] == results[1]
    assert (results[0]["hook"], results[0]["copy"]) == ("node_hook", "")


def test_mean_is_over_workers_also_where_nodes_have_different_numbers(tmp_path):
    with servers(nodes=2, shards=1) as cluster:
        results = start("unequal", cluster, tmp_path, [0, 1, 0]).results()
    assert len({result["bits"] for result in results}) == 1
    assert [result["workers"] for result in results] == [2, 1, 2]
    for result in results:
        assert result["excess"] <= 1


def test_modes_of_ddp_train_as_with_the_sidecars_sums(two_nodes):
    results = [result["modes"] for result in two_nodes]
    for mode in results[0]:
        assert len({result[mode] for result in results}) == 1, mode
    # Two workers, then two nodes: each level halves exactly and rounds one addition.
    modes = {mode.removesuffix(" workers") for mode in results[0] if mode.endswith(" workers")}
    assert len(modes) == 3
    for mode in modes:
        assert results[0][f"{mode} workers"] == results[0][f"{mode} sidecar"]


def test_codecs_state_goes_on_from_a_checkpoint_bit_for_bit(two_nodes):
    results = [result["resumed"] for result in two_nodes]
    assert len({digest for result in results for digest in result["digests"]}) == 1
    keys = [result["keys"] for result in results]
    assert keys == [
        ["codec", "node0", "saved_by"],
        ["codec", "saved_by"],
        ["codec", "node1", "saved_by"],
        ["codec", "saved_by"],
    ]


def test_leader_that_dies_is_named_by_its_follower_at_once(tmp_path):
    with servers(nodes=1) as cluster:
        job = start("bereft", cluster, tmp_path, [0, 0], PATIENCE | {"NODE_JOB_VICTIM": "rank 0"})
        workers = job.wait()
    assert workers[0].code == -signal.SIGKILL
    assert workers[1].code == 0, job.output
    # because the connection ends, not because it is silent
    assert workers[1].result["seconds"] < AT_ONCE
    for key in ("error", "again", "status"):
        assert (
            "rank 0, which speaks to the sidecar for this node, is gone" in workers[1].result[key]
        )


def test_follower_that_dies_fails_the_workers_of_all_nodes_at_once(tmp_path):
    with servers(nodes=2, shards=1) as cluster:
        job = start(
            "bereft", cluster, tmp_path, [0, 0, 1], PATIENCE | {"NODE_JOB_VICTIM": "rank 1"}
        )
        workers = job.wait()
    assert workers[1].code == -signal.SIGKILL
    for worker, expected in ((workers[0], "rank 1"), (workers[2], "node 0")):
        assert worker.code == 0, job.output
        assert worker.result["seconds"] < AT_ONCE
        for key in ("error", "again", "status"):
            assert expected in worker.result[key]


def test_sidecar_that_dies_and_stays_away_fails_all_workers_of_its_node_with_the_reason(tmp_path):
    with servers(nodes=1) as cluster:
        sidecar = cluster.sidecars[0]
        variables = PATIENCE | {"THALWEG_RECONNECT": "1"}
        variables["NODE_JOB_VICTIM"] = f"pid {sidecar.process.pid}"
        results = start("bereft", cluster, tmp_path, [0, 0], variables).results()
        for left in (sidecar.address, f"{sidecar.address}.lock"):
            Path(left).unlink()
    for result in results:
        assert f"the sidecar at {sidecar.address} is gone" in result["error"]
        assert "within 1 s (THALWEG_RECONNECT) no other process" in result["error"]
        assert result["seconds"] < AT_ONCE


@pytest.mark.parametrize(
    "nodes, step_timeout, reason",
    [
        ([0, 0], 8, "rank 0 did not hand over a gradient, for which rank 1 of the same node waits"),
        ([0, 0, 1], 20, "waited 16 s for node 0"),  # a shard loses its patience first
    ],
    ids=["one node", "two nodes"],
)
def test_leader_that_is_late_fails_all_workers_within_the_steps_timeout_with_one_reason(
    nodes, step_timeout, reason, tmp_path
):
    variables = PATIENCE | {"THALWEG_STEP_TIMEOUT": str(step_timeout)}
    with servers(nodes=len(set(nodes)), shards=1) as cluster:
        results = start("late", cluster, tmp_path, nodes, variables).results()
    assert len({result["error"] for result in results}) == 1
    for result in results:
        assert reason in result["error"]
        assert "raise the timeout (THALWEG_STEP_TIMEOUT)" in result["error"]
        assert result["status"] in result["error"]
        assert result["seconds"] < AT_ONCE


def test_choices_are_those_of_the_environment_and_wrong_ones_are_refused(tmp_path):
    variables = {"THALWEG_NODE_REDUCE": "workers", "AIAK_HIERARCHICAL_ALLREDUCE": "1"}
    with servers(nodes=1) as cluster:
        results = start("choices", cluster, tmp_path, [0, 0], variables).results()
    for result in results:
        assert result["path"] == "workers (cpu)"
        assert "rank 0: node_reduce is 'nobody', expected sidecar or workers" in result["value"]
        assert "node_reduce is workers on rank 0 but sidecar on rank 1" in result["differ"]
