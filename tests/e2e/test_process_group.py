"""Tests the back end "thalweg" of torch.distributed, with workers on one node and on several."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import on_nodes
import pytest
from harness import Job, servers

JOBS = Path(__file__).parent / "process_group_jobs.py"
run = functools.partial(on_nodes.run, JOBS)

# Each entry lists how many workers the nodes have, and how many aggregators there are; where there
# are none, the sidecars host shards.
PLACES = [((3,), 0), ((1, 1), 0), ((2, 1, 1), 0), ((1, 2), 1)]


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_collectives_of_random_groups_equal_numpys(nodes, shards, seed, tmp_path):
    results = run("random_collectives", tmp_path, nodes, shards, SEED=str(seed))
    assert results == [[]] * sum(nodes)


@pytest.mark.parametrize(("nodes", "shards"), [PLACES[0], PLACES[2]])
def test_results_that_come_in_parts_equal_numpys(nodes, shards, tmp_path):
    results = run("random_large_collectives", tmp_path, nodes, shards, SEED="3")
    assert results == [[]] * sum(nodes)


def test_nodes_host_shards_beside_as_many_aggregators(tmp_path, capfd):
    with servers(shards=2) as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in range(2)]
        addresses = [sidecar.address for sidecar in sidecars]
        env = {"SEED": "4", "THALWEG_LOCAL_SHARDS": "auto"}
        job = Job("random_collectives", cluster, tmp_path, sidecar_of=addresses, env=env, jobs=JOBS)
        assert job.results() == [[], []]
        assert "host no shard" not in job.output
    assert "node 0 of 2 with 1 workers, 4 shards" in capfd.readouterr().err


def test_sidecar_says_which_ranks_have_come_to_an_open_collective(tmp_path):
    with servers(shards=1) as cluster:
        sidecars = [cluster.add_sidecar() for _ in range(2)]
        addresses = [sidecar.address for sidecar in sidecars]
        env = {"HTTP": sidecars[0].http}
        job = Job("seen_from_outside", cluster, tmp_path, sidecar_of=addresses, env=env, jobs=JOBS)
        done, waiting = job.results()[0]
    assert done["name"].startswith("allreduce ") and done["done_seconds_ago"] is not None
    assert waiting["what"] == "sum of 1000 elements of fp32"
    assert [each["rank"] for each in waiting["came"]] == [0]
    # Node 0 has sent its values: it does not wait for those of node 1.
    assert waiting["done_seconds_ago"] is None


@pytest.mark.parametrize(("nodes", "shards"), PLACES[1:3])
def test_ddp_trains_on_the_back_end_alone(nodes, shards, tmp_path):
    results = run("trained_with_ddp", tmp_path, nodes, shards)
    assert len({result["digest"] for result in results}) == 1
    # Both round sums of four float32 gradients; four steps carry that on.
    assert all(result["difference"] < 1e-5 for result in results)
    assert all(result["change"] > 0.01 for result in results)


@pytest.mark.parametrize(("nodes", "shards"), PLACES[:2])
def test_groups_used_from_threads_in_opposite_orders_finish(nodes, shards, tmp_path):
    world = sum(nodes)
    results = run("groups_from_threads", tmp_path, nodes, shards)
    assert results == [[30.0 * world, 60.0 * world] * 2] * world


@pytest.mark.parametrize(("nodes", "shards"), PLACES[:3])
def test_callbacks_call_collectives_in_their_own_order_whoever_runs_them(nodes, shards, tmp_path):
    world = sum(nodes)
    expected = [sum_ for step in range(20) for sum_ in (10.0 * world, 100.0 * (step + 1) * world)]
    assert run("late_callbacks", tmp_path, nodes, shards) == [expected] * world


@pytest.mark.parametrize(("nodes", "shards"), PLACES[:3])
def test_callbacks_exchange_in_their_own_order(nodes, shards, tmp_path):
    world = sum(nodes)
    values = [value for step in range(10) for value in (10.0, 100.0 * (step + 1))]
    expected = [[value + rank for rank in range(world)] for value in values]
    assert run("late_exchanges", tmp_path, nodes, shards) == [expected] * world


@pytest.mark.parametrize(("nodes", "shards"), PLACES[:2])
def test_callback_may_wait_for_a_collective_that_began_beside_its_own(nodes, shards, tmp_path):
    world = sum(nodes)
    expected = [1.0 * world, 2.0 * world] * 3
    assert run("waiting_callbacks", tmp_path, nodes, shards) == [expected] * world


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_callback_that_overtakes_a_late_one_begins_its_collectives_after_it(nodes, tmp_path):
    world = sum(nodes)
    results = run("overtaken_callback", tmp_path, nodes, 0, THALWEG_TIMEOUT="8")
    assert results == [[1.0 * world, 2.0 * world]] * world


def test_callbacks_of_another_back_end_call_collectives_in_their_own_order(tmp_path):
    expected = [sum_ for step in range(5) for sum_ in (10.0 * 2, 100.0 * (step + 1) * 2)]
    assert run("callbacks_of_gloo", tmp_path, (2,), 0) == [expected] * 2


def test_tensor_that_is_not_contiguous_and_requires_a_gradient_keeps_its_history(tmp_path):
    first, second = run("gradients_through_views", tmp_path, (2,), 0)
    assert first[:6] == second[:6] == [2.0] * 6
    assert first[6] == second[6]


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_thousands_of_collectives_and_messages_may_be_in_flight(nodes, tmp_path):
    assert run("many_in_flight", tmp_path, nodes, 0) == [2 * 3000 * 3.0] * 2


@pytest.mark.parametrize("nodes", [(3,), (1, 1)])
def test_groups_made_again_over_a_store_that_stays_are_new_ones(nodes, tmp_path):
    world = sum(nodes)
    assert run("groups_of_a_store_that_stays", tmp_path, nodes, 0) == [[1.0 * world] * 3] * world


@pytest.mark.parametrize(("nodes", "shards"), PLACES[1:3])
def test_torchs_powersgd_hook_gives_the_same_with_many_buckets_as_with_one(nodes, shards, tmp_path):
    for result in run("powersgd_of_torch", tmp_path, nodes, shards):
        # Sums of float64 in another order differ by 1e-16 of their values, which the hook magnifies
        # where it divides by small pivots; one wrong bucket would be of the order of the change.
        assert result["difference"] < 1e-6 * result["change"]
        assert result["change"] > 0.01


def test_what_is_not_supported_is_refused_by_name_and_the_job_goes_on(tmp_path):
    for result in run("refused", tmp_path, (1, 1), 0):
        assert "BXOR of Float: bits are folded of integers" in result[0]
        assert "AVG of Int: integers have no exact mean" in result[1]
        assert "all_gather_into_tensor of 3 elements" in result[2]
        assert "all_gather_into_tensor of 1 tensors into 0" in result[3]
        assert result[4] == "2"


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_another_shape_fails_on_all_ranks_naming_the_collective(nodes, tmp_path):
    for error in run("mismatched", tmp_path, nodes, 0):
        assert "elements" in error
        assert "3" in error
        assert "4" in error


@pytest.mark.parametrize("nodes", [(3,), (2, 1)])
@pytest.mark.parametrize("call", ["broadcast", "reduce", "gather", "scatter"])
def test_another_root_fails_on_all_ranks_naming_both(nodes, call, tmp_path):
    for error in run("of_another_root", tmp_path, nodes, 0, CALL=call):
        assert f"{call} " in error
        assert "at root 0" in error
        assert "at root 1" in error


def test_another_operation_on_another_node_is_named_within_the_timeout(tmp_path):
    first, second, last = run("of_another_kind", tmp_path, (2, 1), 0, PATIENCE="10")
    for error in (first, second, last):
        assert "or workers call different ones" in error
        assert "waited 10 s for " in error
    for error in (first, second):
        assert "under way on node 0: allreduce 2 of group '0'" in error
    assert "under way on node 1: reduce 2 of group '0'" in last


def test_tensors_whose_memory_holds_negatives_have_their_values(tmp_path):
    assert run("negated", tmp_path, (1, 1), 0) == [[1.0, 2.0, -2.0], [1.0, 2.0, -4.0]]


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_absent_rank_fails_the_collective_of_the_others_within_its_timeout(nodes, tmp_path, capfd):
    error, _ = run("deserted", tmp_path, nodes, 0, PATIENCE="2")
    assert "RuntimeError: thalweg: job" in error
    assert re.search(r"waited 2 s for node 1 \(|rank 1 of the .* timeout of 2 s", error), error
    record = "allreduce 2 of group '0', sum of 3 elements of fp32: rank 0 came"
    log = capfd.readouterr().err
    assert "barrier 1 of group" in log
    assert record in log, log


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_many_collectives_leave_nothing_behind(count, tmp_path):
    with servers() as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in range(2)]
        env = {
            "SEED": "3",
            "COUNT": str(count),
            "PIDS": ",".join(str(sidecar.process.pid) for sidecar in sidecars),
        }
        addresses = [sidecar.address for sidecar in sidecars]
        job = Job("many_collectives", cluster, tmp_path, sidecar_of=addresses, env=env, jobs=JOBS)
        results = job.results(600)
    for result in results:
        assert result["problems"] == []
        half, whole = result["used"]
        print(half, whole)
        for pid, before in half.items():
            after = whole[pid]
            # A new arena, with a descriptor, comes where more or larger ones are in use than ever;
            # gRPC has a thread more or less.
            assert after["descriptors"] <= before["descriptors"] + 4, pid
            assert after["threads"] <= before["threads"] + 4, pid
            assert after["kilobytes"] <= before["kilobytes"] + 8192, pid


def test_rank_that_does_not_come_to_a_new_group_is_named_with_what_limits_the_wait(tmp_path):
    error, _ = run("group_of_one_rank", tmp_path, (2,), 0, THALWEG_TIMEOUT="2")
    assert (
        "TimeoutError: thalweg: rank 1 has not come to the new process group of the back" in error
    )
    assert 'end "thalweg" within 4 s' in error
    assert "(its timeout, or twice THALWEG_TIMEOUT)" in error
