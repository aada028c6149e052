"""Tests compressed shards of fully_shard() on the back end "thalweg"."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

outputs = functools.partial(
    on_nodes.outputs, Path(__file__).parent / "compressed_fsdp_jobs.py", WIDTH="128"
)


ALL = "parameters+whole_numbers+feedback+resumed+poisoned+refused+variants+left_out+swapped+carried"


@pytest.fixture(scope="module")
def fours(tmp_path_factory):
    """Returns what two nodes of two workers did, of each rank, with rows in several parts."""
    folder = tmp_path_factory.mktemp("fours")
    return outputs(ALL, folder, (2, 2), seconds=200, PART="1024")[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    names = "whole_numbers+feedback+resumed+variants+carried"
    return outputs(names, tmp_path_factory.mktemp("pairs"), (1, 1), seconds=200)[0]


@pytest.fixture(params=["pairs", "fours"])
def results(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_all_ranks_compute_with_the_same_rounded_parameters_and_keep_their_own(fours, codec):
    outcomes = [result["parameters"][codec] for result in fours]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert 0.1 < outcome["apart"] <= 1
        assert outcome["kept"]
        assert outcome["asynchronous"]  # unshard(async_op=True) brings the same
        assert outcome["small are exact"] == (codec == "int8")


def test_values_that_a_type_holds_train_to_the_bits_of_float32(results):
    for result in results:
        assert set(result["whole_numbers"]) == {"fp16 0", "fp16 0.5", "bf16 0", "bf16 0.5"}
        for same in result["whole_numbers"].values():
            assert same == [True, True]


def test_sums_of_int8_gradients_miss_no_more_than_what_is_held_back(results):
    for result in results:
        outcome = result["feedback"]
        assert 0 < outcome["with"] <= outcome["bound"]
    worst = max(result["feedback"]["without"] for result in results)
    assert worst > 3 * results[0]["feedback"]["bound"]  # the bound is not a loose one


def test_training_resumes_with_what_was_held_back_bit_for_bit(results):
    for rank, result in enumerate(results):
        outcome = result["resumed"]
        assert len(set(outcome["digests"])) == 1
        before, after = outcome["held"]
        assert before > 0
        assert after == 0
        assert f"the state has nothing of rank {rank}" in outcome["said"][0]
        assert "saved with codec 'bf16'" in outcome["error"]


def test_checkpoint_of_another_number_of_workers_is_loaded_and_nothing_is_held_back(tmp_path):
    for number, nodes in enumerate([(1, 1), (2, 2), (1, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        results, _ = outputs("resharded", folder, nodes, FOLDER=str(tmp_path / "saved"))
        outcomes = [result["resharded"] for result in results]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        for outcome in outcomes if number else []:
            before, loaded, after = outcome["held"]
            assert before > loaded == 0 < after
            (said,) = outcome["said"]
            then, now = (len(nodes) * n for n in ((2, 1) if nodes == (1, 1) else (1, 2)))
            assert f"saved by {then} workers, sharded over 2 nodes x {then // 2} workers" in said
            assert f"this job has {now} workers, sharded over 2 nodes x {now // 2} work" in said


def test_each_node_holds_back_four_bytes_for_each_parameter_that_others_own(results):
    outcomes = [result["resumed"] for result in results]
    of_a_node = sum(outcome["bytes"] for outcome in outcomes[: len(outcomes) // 2])
    # Filling up adds less than a block of 256 for each rank and matrix, of which 7 are large.
    elements = outcomes[0]["elements"] / 2
    assert 4 * elements <= of_a_node < 4 * (elements + len(outcomes) * 7 * 256)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8:start=0", "int8:start=2"])
def test_gradients_that_are_not_finite_are_counted_and_not_held_back(fours, codec):
    for result in fours:
        assert result["poisoned"][codec] == [True, False, True, True, True]


def test_what_cannot_be_compressed_and_ranks_that_disagree_are_refused_by_name(fours):
    for result in fours:
        said = result["refused"]
        assert "this one is of 'gloo'" in said["gloo"]
        assert "(FSDP1) cannot be compressed" in said["fsdp1"]
        assert "is for models of fully_shard()" in said["plain"]
        assert "in fp16, bf16 or int8, not in powersgd" in said["powersgd"]
        assert "rank 0 asks for gradients in bf16" in said["unequal"]
        assert "rank 1 for gradients in int8" in said["unequal"]


def test_losses_stay_near_those_of_exact_steps_with_all_options_of_fully_shard(results):
    for result in results:
        for outcome in result["variants"].values():
            exact, compressed, alone = outcome["losses"]
            assert compressed == pytest.approx(exact, rel=0.005)
            assert alone != pytest.approx(exact, rel=0.005)  # so near is nobody without the others
    for name in results[0]["variants"]:
        assert len({result["variants"][name]["digest"] for result in results}) == 1


def test_nothing_is_said_where_all_is_compressed(results):
    for result in results:
        for outcome in result["variants"].values():
            assert outcome["said"] == []


def test_parameters_gathered_anew_in_smaller_groups_are_those_of_forward(fours):
    for result in fours:
        assert result["variants"]["smaller"] == result["variants"]["int8"]
        assert result["variants"]["kept"] == result["variants"]["int8"]


def test_bf16_messages_are_not_touched_by_bf16(fours):
    for result in fours:
        exact, compressed, _ = result["variants"]["bf16 over bf16"]["losses"]
        assert exact == compressed


def test_units_without_all_gradients_are_said_to_go_uncompressed_once(fours):
    (said,) = fours[0]["left_out"]
    assert "the reduce-scatter of blocks.0 goes uncompressed" in said
    assert [result["left_out"] for result in fours[1:]] == [[], [], []]


def test_nothing_held_back_of_one_layer_gets_into_another_one_of_its_size(fours):
    assert all(result["swapped"]["same"] for result in fours)
    (said,) = fours[0]["swapped"]["said"]
    assert "the reduce-scatter of the root goes uncompressed: other parameters" in said


def test_int8_sends_at_most_27_hundredths_of_the_bytes_of_float32(results):
    for result in results:
        sent = result["carried"]
        assert 0.25 < sent["int8"] / sent["fp32"] <= 0.27
        for codec in ("fp16", "bf16"):
            assert 0.5 <= sent[codec] / sent["fp32"] < 0.505


def test_environment_compresses_sharded_models_from_the_second_step_on(tmp_path):
    results, text = outputs("by_environment", tmp_path, (1, 1), THALWEG_CODEC="int8:start=0")
    for name in ("first", "second"):
        outcomes = [result["by_environment"][name] for result in results]
        for outcome in outcomes:
            assert outcome["codec"] == "int8:start=0,feedback=1"
            assert outcome["held"] > 0
        assert outcomes[0]["digest"] == outcomes[1]["digest"]
    said = "THALWEG_CODEC=int8:start=0: shards are compressed from the next step on"
    assert text.count(said) == 2  # once for each model, by rank 0
    assert "does nothing" not in text


def test_environment_compresses_sharded_models_that_resume_from_a_checkpoint(tmp_path):
    results, text = outputs(
        "resumed_by_environment", tmp_path, (1, 1), THALWEG_CODEC="int8:start=0"
    )
    for result in results:
        outcome = result["resumed_by_environment"]
        assert outcome["codec"] == "int8:start=0,feedback=1"
        assert outcome["held"] > 0
    assert text.count("shards are compressed from the next step on") == 2
    assert "does nothing" not in text


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        ("powersgd:4", "shards are sent in fp16, bf16 or int8, not in powersgd:rank=4"),
        ("int8;head.*=fp32", "rules of a policy are for DistributedDataParallel"),
    ],
)
def test_codecs_that_shards_do_not_have_are_said_to_do_nothing_by_name(codec, why, tmp_path):
    results, text = outputs("by_environment", tmp_path, (1, 1), THALWEG_CODEC=codec)
    assert [result["by_environment"]["first"]["codec"] for result in results] == ["", ""]
    assert text.count(f"THALWEG_CODEC={codec} does nothing for parameters that torch shards") == 1
    assert why in text


def test_ranks_of_uneven_nodes_make_groups_by_themselves_after_compress(tmp_path):
    results = [result["grouped"] for result in outputs("grouped", tmp_path, (1, 2))[0]]
    assert [[each["sum"] for each in result] for result in results] == [[2, 2], [1, 1], [2, 2]]
    assert len({each["digest"] for result in results for each in result}) == 1


@pytest.mark.long
@pytest.mark.parametrize("nodes", [(1, 2, 2), (2, 2, 2), (3, 1)])
def test_uneven_worlds_train_alike_on_all_ranks(nodes, tmp_path):
    results, _ = outputs("feedback+variants", tmp_path, nodes)
    test_losses_stay_near_those_of_exact_steps_with_all_options_of_fully_shard(results)
    for result in results:
        assert result["feedback"]["with"] <= result["feedback"]["bound"]
