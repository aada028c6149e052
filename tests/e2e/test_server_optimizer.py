"""Tests training with the optimizer on the shards, against the same optimizer on the workers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import on_nodes
import pytest
from harness import Job, metric, servers

JOBS = Path(__file__).parent / "server_optimizer_jobs.py"
run = functools.partial(on_nodes.run, JOBS)

# Each entry lists how many workers the nodes have, and how many aggregators there are; where there
# are none, the sidecars host shards.
PLACES = [((1,), 0), ((2,), 0), ((1, 1), 0), ((2, 1, 1), 0), ((1, 1), 2), ((1, 2), 3)]


def assert_same_bits(results: list[dict[str, Any]]) -> None:
    """All workers have the weights of the optimizer on the workers, which are not the first."""
    assert len({result["servers"] for result in results}) == 1
    for result in results:
        assert result["servers"] == result["workers"] != result["before"]


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
def test_weights_have_the_bits_of_the_workers_own_fused_optimizer(nodes, shards, tmp_path):
    assert_same_bits(run("trained", tmp_path, nodes, shards, OPTIMIZER="adamw"))


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "dampened", "adam", "maximize"])
def test_every_optimizer_has_the_bits_of_the_workers_own(optimizer, tmp_path):
    assert_same_bits(run("trained", tmp_path, (1, 1), 0, OPTIMIZER=optimizer))


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
def test_lamb_has_the_bits_of_the_workers_own_however_tensors_are_cut(nodes, shards, tmp_path):
    # A chunk is one granule: tensors of several granules are on several shards.
    env = {"OPTIMIZER": "lamb", "CHUNK_BYTES": str(4 * 4096)}
    results = run("trained", tmp_path, nodes, shards, **env)
    assert_same_bits(results)
    for result in results:
        ours, theirs = result["norms"]
        assert ours == theirs > 0


@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.1"}], ids=["default", "clipped"])
@pytest.mark.parametrize("how", [{}, {"SCALING": "unscaled"}, {"OVERLAP": "1"}, {"CODEC": "bf16"}])
def test_lamb_of_every_kind_has_the_bits_of_the_workers_own(how, clip, tmp_path):
    env = {"OPTIMIZER": "nvlamb"} | how | clip
    assert_same_bits(run("trained", tmp_path, (1, 1), 2, **env))


@pytest.mark.parametrize(
    "how", [{"OPTIMIZER": "sgd"}, {"OPTIMIZER": "sgd", "CLIP": "0.1"}, {"OPTIMIZER": "lamb"}]
)
def test_steps_and_gradients_count_once_however_many_rounds_an_update_takes(how, tmp_path):
    with servers(nodes=2, shards=1) as cluster:
        sidecars = [each.address for each in cluster.sidecars]
        env = {"STEPS": "5"} | how
        jobs = JOBS.with_name("counted_steps_jobs.py")
        job = Job("counted", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=jobs)
        gradients = 5 * job.results()[0]["bytes"]
        for sidecar in cluster.sidecars:
            assert metric(sidecar, "thalweg_sidecar_steps_total") == 5
            for way in ("sent", "received"):
                label = f'direction="{way}"'
                assert metric(sidecar, "thalweg_sidecar_raw_bytes_total", label) == gradients
        for way in ("sent", "received"):
            raw = metric(cluster.aggregators[0], f"thalweg_shard_{way}_raw_bytes_total")
            assert raw == pytest.approx(2 * gradients)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_gradients_in_16_bits_give_what_they_give_with_the_hook(codec, tmp_path):
    assert_same_bits(run("trained", tmp_path, (1, 1), 1, OPTIMIZER="adamw", CODEC=codec))


@pytest.mark.parametrize(
    "how",
    [{}, {"CLIP": "0.1", "OVERLAP": "1"}, {"SCALING": "unscaled"}],
    ids=["plain", "clipped", "scaled"],
)
@pytest.mark.parametrize(("nodes", "shards"), [((1, 1), 0), ((2, 1), 3)])
def test_gradients_in_8_bits_give_what_they_give_with_the_hook(how, nodes, shards, tmp_path):
    # Chunks are small, so that tensors are cut where the hook does not cut them.
    env = {"OPTIMIZER": "adamw", "CODEC": "int8:start=0", "CHUNK_BYTES": str(4 * 4096)} | how
    assert_same_bits(run("trained", tmp_path, nodes, shards, **env))


def test_lamb_takes_gradients_in_8_bits(tmp_path):
    env = {"OPTIMIZER": "lamb", "CODEC": "int8:start=0"}
    assert_same_bits(run("trained", tmp_path, (1, 1), 2, **env))


# The hook's buckets make other blocks, and choose among other elements.
@pytest.mark.parametrize("codec", ["onebit", "topk:ratio=0.1"])
def test_workers_have_the_same_weights_where_less_goes_up(codec, tmp_path):
    env = {"OPTIMIZER": "sgd", "CODEC": codec}
    results = run("trained", tmp_path, (1, 1), 2, **env)
    assert len({result["servers"] for result in results}) == 1
    assert results[0]["servers"] != results[0]["before"]


def test_accumulated_gradients_are_pushed_once(tmp_path):
    results = run("trained", tmp_path, (1, 1), 0, OPTIMIZER="nesterov", PASSES="3")
    assert_same_bits(results)
    for result in results:
        assert sum(result["waited for"].values()) == result["waited"] > 0
        assert len(result["waited for"]) > 1  # buckets


def test_sidecars_count_what_their_first_worker_has_waited_for_weights(tmp_path):
    with servers(shards=1) as cluster:
        sidecars = [cluster.add_sidecar() for _ in range(2)]
        sockets = [sidecar.address for sidecar in sidecars for _ in range(2)]
        job = Job(
            "trained", cluster, tmp_path, sidecar_of=sockets, env={"OPTIMIZER": "sgd"}, jobs=JOBS
        )
        results = job.results()
        for sidecar, first in zip(sidecars, (results[0], results[2]), strict=True):
            counted = metric(sidecar, "thalweg_sidecar_weights_wait_seconds_total")
            # No push has told of the last weights.
            assert first["waited"] > counted > 0


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
def test_clipped_steps_have_the_bits_of_the_workers_own_fused_optimizer(nodes, shards, tmp_path):
    results = run("trained", tmp_path, nodes, shards, OPTIMIZER="adamw", CLIP="0.5")
    assert_same_bits(results)
    for result in results:
        ours, theirs = result["norms"]
        assert ours == theirs > 0


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam"])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_every_optimizer_clips_with_the_bits_of_the_workers_own(optimizer, codec, tmp_path):
    env = {"OPTIMIZER": optimizer, "CODEC": codec, "CLIP": "0.1"}
    assert_same_bits(run("trained", tmp_path, (1, 1), 2, **env))


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.1"}], ids=["whole", "clipped"])
def test_weights_that_come_during_the_next_forward_have_the_same_bits(
    nodes, shards, clip, tmp_path
):
    env = {"OPTIMIZER": "nesterov", "OVERLAP": "1", "PASSES": "2"} | clip
    assert_same_bits(run("trained", tmp_path, nodes, shards, **env))


@pytest.mark.parametrize("scaling", ["scaled", "unscaled"])
@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.5"}], ids=["whole", "clipped"])
def test_scaler_skips_the_same_steps_as_with_the_workers_own_optimizer(scaling, clip, tmp_path):
    env = {"OPTIMIZER": "adamw", "SCALING": scaling} | clip
    results = run("trained", tmp_path, (1, 1), 0, **env)
    assert_same_bits(results)
    for result in results:
        ours, theirs = result["skipped"]
        assert ours == theirs > 0


@pytest.mark.parametrize(("nodes", "shards"), PLACES)
@pytest.mark.parametrize("optimizer", ["dampened", "adamw", "lamb"])
def test_parameters_without_gradients_stay_with_the_bits_of_the_workers_own(
    optimizer, nodes, shards, tmp_path
):
    env = {"OPTIMIZER": optimizer, "UNUSED": "1", "CLIP": "0.5"}
    assert_same_bits(run("trained", tmp_path, nodes, shards, **env))


@pytest.mark.parametrize(
    "how",
    [{}, {"UNUSED": "idle"}, {"PASSES": "3"}, {"OVERLAP": "1"}, {"SCALING": "scaled"}],
    ids=str,
)
def test_unused_parameters_go_with_everything_else(how, tmp_path):
    env = {"OPTIMIZER": "adam", "UNUSED": "1"} | how
    assert_same_bits(run("trained", tmp_path, (2, 1), 0, **env))


@pytest.mark.parametrize("optimizer", ["dampened", "adamw", "lamb"])
def test_checkpoints_have_the_steps_of_each_parameter(optimizer, tmp_path):
    env = {"OPTIMIZER": optimizer, "UNUSED": "1"}
    for result in run("exchanged_checkpoints", tmp_path, (1, 1), 2, **env):
        assert result["servers then workers"] == result["whole"]
        assert result["workers then servers"] == result["whole"]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw", "lamb"])
def test_checkpoint_of_either_goes_on_in_the_other_with_the_same_bits(optimizer, tmp_path):
    for result in run("exchanged_checkpoints", tmp_path, (1, 1), 2, OPTIMIZER=optimizer):
        assert result["servers then workers"] == result["whole"]
        assert result["workers then servers"] == result["whole"]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "lamb"])
@pytest.mark.parametrize(("nodes", "shards"), [((1, 1), 2), ((2, 1), 0)])
def test_checkpoint_of_parts_goes_on_with_the_same_bits(optimizer, nodes, shards, tmp_path):
    env = {"OPTIMIZER": optimizer, "FOLDER": str(tmp_path / "checkpoint")}
    results = run("sharded_checkpoints", tmp_path, nodes, shards, **env)
    for result in results:
        assert result["loaded"]
        assert result["after"] == result["whole"]
    # No worker has had all of it, and none the same as another one.
    parts = [name for result in results for name in result["part"]]
    assert sorted(parts) == ["0.0", "0.1", "0.2", "1.1", "1.2"]
    assert all(len(result["part"]) < len(parts) for result in results)


@pytest.mark.parametrize("optimizer", ["dampened", "adamw"])
def test_checkpoint_of_parts_has_the_steps_of_each_parameter(optimizer, tmp_path):
    env = {"OPTIMIZER": optimizer, "FOLDER": str(tmp_path / "checkpoint"), "UNUSED": "1"}
    for result in run("sharded_checkpoints", tmp_path, (1, 1), 2, **env):
        assert result["loaded"]
        assert result["after"] == result["whole"]


@pytest.mark.parametrize("pull", ["own", "bf16"])
def test_workers_have_the_shards_float32_weights_rounded(pull, tmp_path):
    first, second = run("rounded_weights", tmp_path, (1, 1), 0, PULL=pull)
    assert first["digest"] == second["digest"]
    assert first["rounded"]
    assert first["differ"]
    assert first["names"] == ["0.weight", "2.bias", "2.weight", "3.bias", "3.weight"]


@pytest.mark.parametrize("pull", ["own", "bf16"])
def test_rounded_weights_lose_nothing_by_publishing_or_by_a_full_checkpoint(pull, tmp_path):
    for result in run("kept_weights", tmp_path, (1, 1), 0, PULL=pull):
        assert result["published"] == result["whole"]
        assert result["restored"] == result["whole"]
        assert result["rounded"] != result["whole"]  # so the test can tell
        assert "ValueError: thalweg: weights of 3.bias: expected [10], got none" in result["part"]


@pytest.mark.parametrize("how", [{}, {"CLIP": "0.1", "OVERLAP": "1", "CODEC": "int8"}])
@pytest.mark.parametrize("pull", ["int8", "onebit"])
def test_weights_that_come_as_differences_lack_what_the_last_one_has_left_out(pull, how, tmp_path):
    results = run("followed", tmp_path, (2, 1), 3, PULL=pull, **how)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        (largest, norm), (most_left, norm_left) = result["changed"], result["left"]
        assert 0 < norm_left < norm  # both formats take something away from what they encode
        if pull == "int8":
            # Half of a block's scale, which is its largest element over 125. What has the size of
            # that is rounded five times on the way (difference, scale, its inverse and two
            # products), and the sum once.
            rounding = 2**-24 * (6 * largest + result["largest"])
            assert most_left <= largest / 250 + rounding


def test_parameters_changed_by_hand_and_published_are_the_shards(tmp_path):
    assert_same_bits(run("changed_and_published", tmp_path, (1, 1), 0))


EXPECTED = [
    "ValueError: thalweg: optimizer 'adagrad', expected sgd, adam, adamw, lamb",
    "ValueError: thalweg: group 0 has amsgrad, which shards do not have",
    "ValueError: thalweg: pull is 'topk', expected fp32, fp16, bf16, int8, onebit",
    "ValueError: thalweg: pull='int8' needs all nodes in the same step: it goes with mode=\"sync\"",
    "ValueError: thalweg: pull is 'onebit', but there are parameters in fp16",
    "does not go with ServerOptimizer: expected fp32, fp16, bf16, int8, onebit or topk (codec=, ",
    "codec int8:start=3,feedback=1 does not go with ServerOptimizer, whose shards take gradients",
    'does not go with mode="async": expected fp32, fp16 or bf16',
    "does not go with find_unused_parameters: expected fp32, fp16 or bf16",
    "snapshots (snapshot_every=, THALWEG_SNAPSHOT_EVERY) do not go with codec int8:start=0",
    "snapshots (snapshot_every=, THALWEG_SNAPSHOT_EVERY) do not go with pull='int8': expected fp32",
    "snapshots (snapshot_every=, THALWEG_SNAPSHOT_EVERY) do not go with find_unused_parameters",
    "TypeError: thalweg: ServerOptimizer(…, 'adam') has no argument momentum; those of adam are lr",
    "parameter 0.0 is torch.float64: ServerOptimizer takes float32, float16 and bfloat16",
    "ValueError: thalweg: pull is 'bf16', but there are parameters in fp16",
    "0.0 float32[3, 3] on rank 0, 0.0 float32[4, 3] on rank 1",
    "RuntimeError: thalweg: ServerOptimizer cannot add groups: make a new one",
    "ValueError: thalweg: no parameter requires a gradient",
    "ValueError: thalweg: max_grad_norm is 1.0, but shards update before all gradients are known",
    "ValueError: thalweg: group 0 has no grad_averaging, which shards have",
    "ValueError: thalweg: group 1 has max_grad_norm 2, group 0 1: shards have one for all",
]


def test_what_shards_cannot_do_is_refused_by_name_on_all_workers(tmp_path):
    for result in run("refused", tmp_path, (1, 1), 0):
        assert len(result) == len(EXPECTED)
        for found, expected in zip(result, EXPECTED, strict=True):
            assert expected in found
