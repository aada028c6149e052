"""Tests sums over copies of shards, on a mesh of nodes and their workers, in codecs."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

outputs = functools.partial(
    on_nodes.outputs, Path(__file__).parent / "compressed_copies_jobs.py", WIDTH="128"
)
NAMES = "trained+delivered+recovered+whole_numbers+resumed+said+asked_again+variants+swapped_copies"
# Of float32's bytes, without the tensors that stay in fp32 or fp16 (docs/codecs.md). What top-k
# sends back depends on the data: the elements that any of both nodes has sent.
SHARES = {"fp16": 0.5, "bf16": 0.5, "int8": 0.27, "onebit": 0.05, "topk": 0.25, "powersgd": 0.2}

# How much of what exact steps do to a loss may be missing. Sums in 16 bits are rounded on the way
# to a shard and back, by 2^-11 or 2^-8 of each element, and what a step lacks can double until the
# last one. int8 rounds by 1/250 of a block's largest element, which is some three times the root
# of their mean square: by 3/250 of the way, if all of it were against the descent. The others hold
# back most of a gradient in the first steps, but must have gone a third of the way.
MISSING = {"fp16": 4 * 2**-11, "bf16": 4 * 2**-8, "int8": 12 / 250}
MOST = 2 / 3


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Returns what two nodes of two workers did, of each rank, and what they said."""
    folder = tmp_path_factory.mktemp("copies")
    return outputs(NAMES, folder, (2, 2), seconds=200)


@pytest.fixture(scope="module")
def results(ran):
    return ran[0]


def codecs_of(results):
    return [codec for codec in results[0]["trained"] if codec]


def test_every_codec_sums_over_copies_alike_on_all_ranks_and_trains(results):
    assert len(codecs_of(results)) == 7
    for codec in codecs_of(results):
        outcomes = [result["trained"][codec] for result in results]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        for outcome, exact in zip(outcomes, (r["trained"][""] for r in results), strict=True):
            assert [spec.partition(":")[0] for spec in outcome["in"]] == [codec.partition(":")[0]]
            assert outcome["rounds"] == 4 * 3  # of three units
            # "auto" may find that float32 is the fastest here.
            assert codec.startswith("auto") or outcome["digest"] != exact["digest"]
            assert outcome["losses"][0] == exact["losses"][0]
            assert outcome["losses"] == pytest.approx(exact["losses"], rel=0.1)
            apart = abs(outcome["losses"][-1] - exact["losses"][-1])
            way = abs(exact["untrained"][-1] - exact["losses"][-1])
            assert apart <= MISSING.get(codec.partition(":")[0], MOST) * way, codec


def test_nothing_is_said_where_sums_over_copies_are_compressed_and_the_state_is_found(results):
    for result in results:
        for codec in codecs_of(results):
            assert result["trained"][codec]["said"] == []
            assert result["trained"][codec]["found"]


def test_sums_over_copies_send_the_share_of_bytes_of_their_codec(results):
    for result in results:
        exact = result["trained"][""]["sent"]
        for codec, share in SHARES.items():
            [sent] = [v["sent"] for k, v in result["trained"].items() if k.startswith(codec)]
            assert 0 < sent <= share * exact


def test_what_copies_get_and_hold_back_is_the_true_sum(results):
    for result in results:
        assert len(result["delivered"]) == 4
        for codec, missing in result["delivered"].items():
            assert missing <= 1, codec


def test_powersgd_recovers_means_of_low_rank_from_shards(results):
    for result in results:
        assert result["recovered"]["rank 4"] <= 1
        assert result["recovered"]["rank 1"] > 1  # which too small factors miss


def test_values_that_a_type_holds_sum_to_the_bits_of_float32_also_when_accumulated(results):
    for result in results:
        assert len(result["whole_numbers"]) == 6
        assert all(result["whole_numbers"].values()), result["whole_numbers"]


def test_training_resumes_with_what_copies_held_back_bit_for_bit(results):
    for rank, result in enumerate(results):
        assert len(result["resumed"]) == 2
        for outcome in result["resumed"].values():
            assert len(set(outcome["digests"])) == 1
            assert outcome["error"].startswith(
                "ValueError: thalweg: the state was saved with codec"
            )
            assert f"the state has nothing of rank {rank}" in outcome["said"][-1]


def test_sums_over_copies_begin_anew_on_all_ranks_that_load_the_state_of_one(tmp_path):
    results, _ = outputs("resumed_by_one", tmp_path, (2, 2))
    outcomes = [result["resumed_by_one"] for result in results]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    lost = "what is held back of gradients begins at zero"
    of_sums = "rank 2: what is held back of sums over copies begins at zero"
    for rank, outcome in enumerate(outcomes):
        [said] = outcome["said"]
        assert (lost if rank else of_sums) in said


def test_losses_stay_near_those_of_exact_sums_with_options_of_fully_shard(results):
    for name in ("uneven", "kept", "bf16"):
        outcomes = [result["variants"][name] for result in results]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        for outcome in outcomes:
            exact, compressed, first = outcome["losses"]
            assert compressed == pytest.approx(exact, rel=0.05)
            # The steps after the first one, which are compressed, have done half of their work.
            assert abs(compressed[-1] - exact[-1]) <= abs(first[-1] - exact[-1]) / 2
            assert compressed[:2] == exact[:2]  # of which the first step is not compressed yet
            assert compressed != exact
            assert outcome["said"] == []


def test_what_is_not_compressed_or_is_wrong_is_said_by_name(results):
    for result in results:
        said = result["said"]
        assert "copies is 'zip', expected one of fp32" in said["unknown"][0]
        assert "in fp16, bf16 or int8, not in onebit" in said["gather"][0]
        assert "sums over copies in fp16" in said["unequal"][0]
        assert "thalweg" in said["closed"][0]
        assert said["closed"][0].startswith("RuntimeError")
        assert said["exact"][0] == said["frozen"][0] == "no error"
    said = results[0]["said"]
    assert "gradients of 3 of 3 units are not compressed" in said["exact"][1]
    assert "sums over copies are to be exact" in said["exact"][1]
    assert len(said["frozen"]) == 2
    assert "the sum over copies of blocks.0 goes uncompressed" in said["frozen"][1]
    assert [result["said"]["frozen"][1:] for result in results[1:]] == [[], [], []]


def test_nothing_held_back_of_one_layer_gets_into_another_one_of_its_size(results):
    assert all(result["swapped_copies"]["same"] for result in results)
    (said,) = results[0]["swapped_copies"]["said"]
    assert "the sum over copies of the root goes uncompressed: other parameters" in said


def test_sums_over_copies_are_exact_again_when_asked_to_be(results):
    for result in results:
        assert len(set(result["asked_again"]["digests"])) == 1


def test_modules_that_are_sharded_together_are_one_unit(results):
    for result in results:
        assert result["asked_again"]["units"] == ["the root", "0"]


def test_shards_and_their_copies_are_both_compressed_where_both_cross_nodes(tmp_path):
    results, _ = outputs("both", tmp_path, (1, 1, 1, 1))
    outcomes = [result["both"] for result in results]
    assert len({outcome["both"]["digest"] for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome["both"]["said"] == []
        exact, losses = outcome["exact"]["losses"], outcome["both"]["losses"]
        assert losses == pytest.approx(exact, rel=0.1)
        assert abs(losses[-1] - exact[-1]) <= MOST * abs(outcome["untrained"][-1] - exact[-1])
        assert outcome["both"]["digest"] != outcome["exact"]["digest"]
        assert "not in powersgd" in outcome["refused"]
        assert "copies= has the codec of sums over copies" in outcome["refused"]


def test_environment_compresses_sums_over_copies_in_a_codec_that_shards_do_not_have(tmp_path):
    codec = "powersgd:rank=4,start=0"
    results, text = outputs("unmentioned", tmp_path, (2, 2), THALWEG_CODEC=codec)
    for name in ("first", "second"):
        outcomes = [result["unmentioned"][name] for result in results]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
        assert [spec.partition(",")[0] for o in outcomes for spec in o["copies"]] == (
            ["powersgd:rank=4"] * 4
        )
    assert text.count(f"THALWEG_CODEC={codec}: shards are compressed from the next step on") == 2
    assert "does nothing" not in text
