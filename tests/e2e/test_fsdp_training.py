"""Tests FSDP1 and FSDP2 on the back end "thalweg", beside Gloo."""

from __future__ import annotations

import functools
from pathlib import Path

import fsdp1_cases
import fsdp2_cases
import on_nodes
import pytest

JOBS = Path(__file__).parent / "fsdp_jobs.py"
run = functools.partial(on_nodes.run, JOBS)

# Where all groups are pairs, a sum has one order, and both back ends the same bits.
PAIRS = [*fsdp1_cases.CASES, *fsdp2_cases.CASES]
PAIRS.remove("divided_by_3")  # Gloo divides by 3 where ours multiplies by a third
# With four workers only groups of two have one order of sums.
HYBRID = ["hybrid_shard", "mesh_of_copies", "clipped_copies"]
FOURS = [
    *("full_shard", "all_bf16", "gradients_bf16", "accumulated_and_clipped", "full_shard_flat"),
    *("fully_shard", "uneven", "parameters_and_gradients_bf16", "clipped", "divided_by_3"),
]


def trained(tmp_path: Path, nodes: tuple[int, ...], cases: list[str], steps: int):
    return run("beside_gloo", tmp_path, nodes, CASES=",".join(cases), STEPS=str(steps))


def check_close(outcome) -> None:
    """Checks what compare() of fsdp_models.py derives bounds for."""
    assert outcome["apart"] <= outcome["bound"]
    ours, theirs = outcome["losses"]
    assert ours == pytest.approx(theirs, rel=0, abs=outcome["loss bound"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Returns the outcomes of two workers on two nodes, of each rank."""
    return trained(tmp_path_factory.mktemp("pairs"), (1, 1), PAIRS, 3)


@pytest.fixture(scope="module")
def fours(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("fours"), (2, 2), FOURS + HYBRID, 3)


@pytest.mark.parametrize("name", PAIRS)
def test_two_workers_train_to_the_bits_of_gloo(pairs, name):
    first, second = (result[name] for result in pairs)
    assert first["same bits"]
    assert second["same bits"]
    assert first["change"] > 0.001  # three steps of rate 0.1, some with gradients of norm 0.1
    assert second["names"] == []  # the whole state is rank 0's alone
    assert "blocks.1.narrow.weight" in first["names"]


@pytest.mark.parametrize("name", HYBRID)
def test_copies_of_shards_on_two_nodes_train_to_the_bits_of_gloo(fours, name):
    assert [result[name]["same bits"] for result in fours] == [True] * 4


@pytest.mark.parametrize("name", FOURS)
def test_four_workers_train_as_on_gloo_but_for_rounding(fours, name):
    for result in fours:
        check_close(result[name])
    assert fours[0][name]["change"] > 0.001


@pytest.mark.long
@pytest.mark.parametrize("nodes", [(1, 2, 2), (2, 2, 2)])
def test_uneven_worlds_train_as_on_gloo_but_for_rounding(nodes, tmp_path):
    hybrid = ["hybrid_shard", "mesh_of_copies"] if nodes[0] == 2 else []
    cases = ["full_shard_flat", "fully_shard", "uneven", "clipped", *hybrid]
    for result in trained(tmp_path, nodes, cases, 5):
        for outcome in result.values():
            check_close(outcome)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)])
def test_fifty_steps_are_those_of_gloo(nodes, tmp_path):
    cases = ["full_shard", "all_bf16", "hybrid_shard", "fully_shard", "mesh_of_copies"]
    for result in trained(tmp_path, nodes, cases, 50):
        for name, outcome in result.items():
            check_close(outcome)
            assert outcome["same bits"] or (nodes == (2, 2) and name not in HYBRID)
            losses = outcome["losses"][0]
            assert sum(losses[-10:]) < sum(losses[:10])


def test_whole_state_moves_between_kinds_of_sharding_bit_for_bit(tmp_path):
    first, second = run("moved", tmp_path, (1, 1), FOLDER=str(tmp_path / "saved"))
    assert first["same"] == [True] * 4
    assert first["trained"]
    assert first["files"] == ["tiny-2026-01-02-03.00.00-4.pt"]
    assert second["empty"] == [True, True]


def test_state_without_a_parameter_is_refused_and_bf16_is_said_to_be_summed_in_float32(tmp_path):
    results = run("missing", tmp_path, (2,))
    assert 'Missing key(s) in state_dict: "head.bias"' in results[0]["error"]
    for result in results:
        assert result["bf16 is ready"]
        assert "sums it in float32 and rounds once" in result["remark"]


@pytest.mark.parametrize(
    "case", ["full_shard", pytest.param("full_shard_flat", marks=pytest.mark.long)]
)
def test_codec_of_a_sharded_model_is_said_to_do_nothing(case, tmp_path):
    env = {"CASES": case, "STEPS": "2", "THALWEG_CODEC": "int8"}
    _, text = on_nodes.outputs(JOBS, "beside_gloo", tmp_path, (2,), **env)
    assert text.count("THALWEG_CODEC=int8 does nothing for parameters that torch shards") == 1
    assert "--- worker 0\nthalweg: THALWEG_CODEC=int8" in text


def test_each_node_sends_the_bytes_that_the_formula_says(tmp_path):
    for result in run("carried", tmp_path, (2, 2)):
        for sent, expected in result.values():
            assert sent == expected  # of values, without headers; no row needs filling up
