"""Tests workers that step by themselves, against DiLoCo in one process and numbers by hand."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import on_nodes
import pytest
from harness import Job, servers

JOBS = Path(__file__).parent / "local_optimizer_jobs.py"
run = functools.partial(on_nodes.run, JOBS)


EXACT = ["plain", "fragments", "delayed", "streaming", "weighted", "adam", "rounded"]
CODED = ["fp16", "bf16", "int8", "int8 delayed", "int8 adam"]
OWN = ["sparse", "sparse delayed", "signs", "signs delayed"]


@pytest.mark.parametrize("case", EXACT + CODED + OWN)
def test_workers_have_the_bits_of_diloco_in_one_process(case, tmp_path):
    for result in run("trained", tmp_path, (1, 1), 0, CASE=case):
        assert result["workers"] == result["diloco"] != result["before"]
        assert result["whole"]


@pytest.mark.parametrize("case", ["streaming", "sparse delayed", "signs delayed"])
@pytest.mark.parametrize(("nodes", "shards"), [((2,), 0), ((1, 1), 2)])
def test_bits_are_the_same_wherever_workers_and_shards_are(nodes, shards, case, tmp_path):
    for result in run("trained", tmp_path, nodes, shards, CASE=case):
        assert result["workers"] == result["diloco"] != result["before"]
        assert result["whole"]


@pytest.mark.parametrize("case", OWN)
def test_finish_sends_what_workers_have_kept_so_that_all_have_the_same(case, tmp_path):
    first, second = run("trained", tmp_path, (1, 1), 0, CASE=case)
    assert first["workers"] != second["workers"]  # each has what it has not sent
    assert first["finished"] == second["finished"] == first["diloco finished"]


# Rounding: a step rounds a weight, which is at most 1, by half a unit in the last place, and so do
# the difference, its mean, the momentum's sum and the update, of which none is above 2.
ROUNDED = 30 * 2.0**-23


def test_one_weight_takes_the_values_computed_by_hand(tmp_path):
    # Two steps make 0.49 of a weight. Nesterov's: m' = 0.9 m + d, w' = w - 0.7 (d + 0.9 m') with
    # d = 0.51 w: 1, m = 0.51; 0.3217, m = 0.623067; -0.18567911, m = 0.4660639539; -0.413011958687.
    # Delayed: 1/16 has left after four steps, and lands on 1/32, of which a half stays.
    delayed = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 3 / 64, 3 / 128, 3 / 256, 3 / 512, 9 / 2048]
    for rank, result in enumerate(run("series", tmp_path, (1, 1), 0)):
        assert result["plain"] == pytest.approx([0.7, 0.49, 0.343, 0.2401], abs=ROUNDED)
        assert result["nesterov"][1::2] == pytest.approx(
            [0.3217, -0.18567911, -0.413011958687], abs=ROUNDED
        )
        assert result["delayed"] == delayed
        # The workers reach their targets, 0 and 1, at once, and count 1 and 3.
        assert result["weighted"] == [rank, 0.75]


def test_plain_mean_is_torchs_local_sgd(tmp_path):
    # The loss is quadratic with L <= 1 for inputs of norm 1 and lr = 0.1 < 2, so a step does not
    # widen the distance of two weight vectors; rounding does, on each side: the update by u W, and
    # lr times the gradient, whose elements are sums of 8 products of sums of 8 and at most W + 1,
    # by 20 u of that; an exchange by a difference, a mean, and two updates. All are vectors of 8.
    u, steps, exchanges = 2.0**-24, 40, 10
    for result in run("averaged", tmp_path, (1, 1), 0):
        largest = 8**0.5 * result["largest"]
        of_steps = 2 * steps * (u * largest + 0.1 * 20 * u * (largest + 1))
        tolerance = of_steps + exchanges * 4 * u * 2 * largest
        assert result["differ"] < tolerance
        assert result["moved"] > 1000 * tolerance


@pytest.mark.parametrize(("nodes", "shards"), [((1, 1), 0), ((2, 1, 1), 0), ((2, 2), 3)])
def test_finish_leaves_the_same_weights_on_all_and_changes_them_once(nodes, shards, tmp_path):
    results = run("finished", tmp_path, nodes, shards)
    # Three steps leave an eighth of the way from 1 to the rank. All sums are exact.
    own = [rank + (1 - rank) / 8 for rank in range(sum(nodes))]
    assert [result["own"] for result in results] == own
    for result in results:
        assert result["after"] == result["again"] == sum(own) / len(own)
        assert result["stats"]["exchanges"] == 1
        assert result["stats"]["raw_bytes"] == 4  # one weight
        assert result["stats"]["exchange_seconds"] > 0


def test_finish_right_after_an_exchange_leaves_no_worker_a_part_of_its_own_weights(tmp_path):
    # Rank 0 comes from 1 to 1/4, rank 1 stays at 1. Nesterov's first step is 3/2 times their mean
    # change of 3/8: 7/16, of which the workers take a half.
    own = [11 / 32, 23 / 32]
    for rank, result in enumerate(run("mixed", tmp_path, (1, 1), 0)):
        assert result["seen"] == [own[rank], 7 / 16, 7 / 16]
        assert result["whole"] == 7 / 16
        assert result["exchanges"] == 1


def test_codec_that_begins_late_is_said_once(tmp_path):
    run("finished", tmp_path, (1, 1), 0, THALWEG_CODEC="powersgd")
    logs = [(tmp_path / f"finished{rank}.log").read_text() for rank in (0, 1)]
    said = "changes are not compressed in the first 1000 exchanges"
    assert [log.count(said) for log in logs] == [1, 0]


def test_step_that_a_scaler_leaves_out_on_one_worker_counts_like_the_others(tmp_path):
    first, second = run("skipped", tmp_path, (1, 1), 0)
    assert (first["scale"], second["scale"]) == (8.0, 4.0)
    assert first["weights"] == second["weights"] == [0.5, 0.375, 0.1875, 0.09375]


def test_published_parameters_are_rank_0s_on_all_workers(tmp_path):
    for result in run("published", tmp_path, (1, 1), 0):
        assert result["weights"] == [16.0, 8.0, 4.0]


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize(
    "case",
    [
        *("plain", "streaming", "weighted", "adam", "int8 adam", "int8 delayed"),
        *("sparse delayed", "signs delayed", "powersgd"),
    ],
)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(case, first, tmp_path):
    results = run("resumed", tmp_path, (1, 1), 0, CASE=case, FIRST=first)
    for result in results:
        assert result["resumed"] == result["whole"] != result["before"]
    assert results[0]["whole"] == results[1]["whole"]


@pytest.mark.parametrize(
    "case", ["streaming", "int8 delayed", "signs", "signs delayed", "powersgd"]
)
def test_all_workers_may_go_on_from_rank_0s_checkpoint(case, tmp_path):
    env = {"CASE": case, "FIRST": "model", "WHOSE": "rank 0's"}
    first, second = run("resumed", tmp_path, (1, 1), 0, **env)
    assert first["resumed"] == second["resumed"] != first["before"]
    logs = [(tmp_path / f"resumed{rank}.log").read_text() for rank in (0, 1)]
    lost = "what LocalOptimizer's codec holds back begins at zero: it was saved by "
    assert [log.count(lost) for log in logs] == [0, int(case not in {"streaming", "signs"})]


def test_nodes_that_had_no_codec_of_their_own_go_on_counting_with_rank_0(tmp_path):
    env = {"CASE": "powersgd", "FIRST": "model", "WHOSE": "one node's"}
    first, second = run("resumed", tmp_path, (1, 1), 0, **env)
    assert first["resumed"] == second["resumed"] != first["before"]
    logs = [(tmp_path / f"resumed{rank}.log").read_text() for rank in (0, 1)]
    assert [log.count("it was saved by nobody, and this is") for log in logs] == [0, 1]


def test_weights_on_their_way_land_before_a_shorter_interval_lets_them_leave_again(tmp_path):
    # Rank 0 comes from 1 to 1/16, rank 1 stays at 1; of their mean nothing is taken back.
    for result in run("replanned", tmp_path, (1, 1), 0):
        assert result == [17 / 32, 17 / 32]


@pytest.mark.parametrize(
    "codec", ["fp32", "int8:start=0", "powersgd:start=0", "sparse:1", "signs:1"]
)
def test_parameters_without_elements_are_left_alone(codec, tmp_path):
    # A step makes half of 1, and 1, the mean of which is 3/4. Nesterov's goes 1.9 times as far.
    for result in run("hollow", tmp_path, (1, 1), 0, CODEC=codec):
        assert result["weights"][0] == pytest.approx([1 - 1.9 / 4], abs=ROUNDED)
        assert len(result["weights"][1]) == 1
        assert result["exchanges"] == 4


@pytest.mark.parametrize(("codec", "arrived"), [("sparse:0.03125", 2), ("signs:2", 32)])
def test_changes_that_are_not_finite_are_counted_where_they_arrive(codec, arrived, tmp_path):
    for result in run("poisoned", tmp_path, (1, 1), 0, CODEC=codec):
        assert result == {"counted": [0, arrived], "arrived": arrived}


def test_parameters_in_bfloat16_are_the_shards_float32_weights_rounded(tmp_path):
    first, second = run("halved", tmp_path, (1, 1), 0)
    assert first["after"] == second["after"] != first["before"]
    assert first["rounded"]
    assert first["differ"]  # the shards keep more


# All nodes together send fp32 changes to n - 1 shards, and get as many weights. int8 has a scale of
# 4 bytes for 256 elements, and small tensors are in fp16. Of sparse changes, 1 of 50 is sent to
# n - 1 nodes by each, with 2 bits of value and between 5 and 8 of place; of signs, a row of four,
# with 16 bits for 1000 elements.
FEWER = [
    ((1, 1), "fp16", 4 / 3, 4 / 3),  # weights come in fp32
    ((1, 1), "int8:start=0", 3.9, 4),
    ((1, 1), "sparse:0.02", 4 * 8 * 50 / 10, 4 * 8 * 50 / 7),
    ((1, 1), "signs", 32 * 4 / 1.05, 32 * 4),
    ((1, 1, 1), "int8:start=0", 3.9, 4),
    ((1, 1, 1), "sparse:0.02", 4 * 8 * 50 / 10 * 2 / 3, 4 * 8 * 50 / 7 * 2 / 3),
    ((1, 1, 1), "signs", 32 * 4 * 2 / 3 / 1.05, 32 * 4 * 2 / 3),
]


@pytest.mark.parametrize(("nodes", "codec", "least", "most"), FEWER)
def test_exchange_sends_fewer_bytes_by_what_its_codec_saves(nodes, codec, least, most, tmp_path):
    results = run("bytes_of_exchange", tmp_path, nodes, 0, CODEC=codec)
    fp32, coded = (sum(each[key] for each in results) for key in ("fp32", "coded"))
    print(f"{codec}, {len(nodes)} nodes: {fp32 / coded:.2f} times fewer bytes than fp32")
    assert fp32 == 2 * 4 * results[0]["elements"] * (len(nodes) - 1) * 2  # in two exchanges
    assert least <= fp32 / coded <= most
    if codec.startswith(("sparse", "signs")):
        assert sum(each["counted"] for each in results) == coded


def test_bytes_of_a_step_are_less_than_a_49th_of_gradients_in_each(tmp_path):
    for result in run("bytes_sent", tmp_path, (1, 1), 0):
        assert 0 < result["local"] <= result["ddp"] / 49


EXPECTED = [
    "ValueError: thalweg: every is 0, expected 1 step or more",
    "ValueError: thalweg: fragments is 5, expected 1 to 4",
    "ValueError: thalweg: fragments is 3, but only 2 parameters require a gradient",
    "ValueError: thalweg: delay is 4, expected 0 to 3 steps",
    "ValueError: thalweg: mix is 1.0, expected 0 or more, and less than 1",
    "ValueError: thalweg: outer has name 'lamb', expected nesterov, sgd, adam, adamw",
    "TypeError: thalweg: LocalOptimizer(outer={'name': 'sgd', …}) has no argument beta; those of ",
    "ValueError: thalweg: pull is 'int8', expected fp32, fp16, bf16",
    "ValueError: thalweg: codec is 'sparse:2': ratio is '2', expected a number above 0, at most 1",
    "auto, sparse, signs (did you mean signs?)",
    "pull='bf16' does not go with codec int8:start=2,feedback=1",
    "pull='fp32' does not go with codec signs:parts=4, with which no weights come from shards",
    "parameter 0.0 is torch.float64: LocalOptimizer takes float32, float16 and bfloat16",
    "parameter 0.0 is sharded (DTensor): LocalOptimizer takes whole ones",
    "ValueError: thalweg: no parameter requires a gradient",
    "optimizers' arguments differ: every 4 on rank 0 but every 5 on rank 1",
    "optimizers' arguments differ: momentum 0.5 on rank 0 but momentum 1.5 on rank 1",
    "RuntimeError: thalweg: LocalOptimizer cannot add groups: make a new one",
    "ValueError: thalweg: the inner optimizer has float32 masters of half-precision parameters",
    "ValueError: thalweg: the inner optimizer has float32 masters of half-precision parameters",
    "ValueError: thalweg: this is the state of no LocalOptimizer",
    "ValueError: thalweg: rank 1 loads a checkpoint of step 5, rank 0 of step 0",
]


def test_what_cannot_be_is_refused_by_name_on_all_workers(tmp_path):
    for result in run("refused", tmp_path, (1, 1), 0):
        assert len(result) == len(EXPECTED)
        for found, expected in zip(result, EXPECTED, strict=True):
            assert expected in found


BROKEN = {
    "change_weights": "2.weight has been changed by other code than step(), on this worker alone",
    "change_weights_and_finish": "2.weight has been changed by other code than step()",
    "change_weights_and_look": "2.weight has been changed by other code than step()",
    "step_alone": "step() of the inner optimizer was called, and nothing would be exchanged",
    "freeze": "2.bias, 2.weight requires no gradient any more, but did when LocalOptimizer",
    "count": "count() needs a LocalOptimizer that was made with weighted=True",
}


@pytest.mark.parametrize("how", BROKEN)
def test_script_at_fault_is_told_why_and_nobody_waits_for_it(how, tmp_path):
    first, second = run("broken", tmp_path, (1, 1), 0, BREAK=how)
    assert "RuntimeError: " in first
    assert BROKEN[how] in first
    assert "Error: " in second


@pytest.mark.parametrize("codec", ["fp32", "int8", "signs"])
def test_worker_that_does_not_come_to_an_exchange_is_named_within_the_groups_timeout(
    codec, tmp_path
):
    env = {"THALWEG_STEP_TIMEOUT": "auto", "CODEC": codec}
    first, second = run("absent", tmp_path, (1, 1), 0, **env)
    waited = re.search(r"waited ([\d.]+) s for node 1 ", first)
    assert waited, first
    assert float(waited[1]) <= 20
    assert second == "absent"


@pytest.mark.parametrize(
    ("nodes", "codec"), [((1, 1), "fp32"), ((2,), "fp32"), ((1, 1), "int8"), ((1, 1), "signs")]
)
def test_finish_of_one_worker_fails_on_all_instead_of_pairing_with_an_exchange(
    nodes, codec, tmp_path
):
    for result in run("finished_alone", tmp_path, nodes, 0, CODEC=codec):
        assert "RuntimeError: thalweg: some workers are in finish(), others in a step" in result


ALIKE = {
    "thawed": "3.bias requires a gradient now, but did not when LocalOptimizer was made",
    "uncounted": "no worker has counted anything: call count() before each step",
}


@pytest.mark.parametrize("job", ALIKE)
def test_what_all_workers_do_wrong_all_are_told(job, tmp_path):
    for result in run(job, tmp_path, (1, 1), 0):
        assert f"RuntimeError: thalweg: {ALIKE[job]}" in result


@pytest.mark.parametrize("made", ["before", "after"])
def test_model_in_distributed_data_parallel_is_refused(made, tmp_path):
    for result in run("in_ddp", tmp_path, (1, 1), 0, DDP=made):
        assert "RuntimeError: thalweg: the model is in DistributedDataParallel" in result


def test_training_may_begin_in_distributed_data_parallel_and_leave_it(tmp_path):
    first, second = (result["seen"] for result in run("left_ddp", tmp_path, (1, 1), 0))
    # The same weights after the step in common, own ones after one alone, then an exchange.
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "rank 1 on "),
        ({"WEIGHTED": "1"}, ""),
        ({"CODEC": "int8"}, "rank 1 on "),
        ({"CODEC": "sparse"}, "rank 1 on "),
    ],
    ids=["equal", "weighted", "int8", "sparse"],
)
def test_only_worker_of_a_node_that_is_killed_is_named_to_the_others(env, said, tmp_path):
    with servers(shards=1) as cluster:
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        job = Job("trained_on_and_on", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        job.await_rounds(50)
        job.workers[1].process.kill()
        first, _ = job.wait()
        assert "RuntimeError: thalweg: " in first.result
        assert said in first.result
