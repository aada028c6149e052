"""Compares real training jobs on several nodes and aggregators with plain DDP over Gloo."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from harness import Job, metric, servers


@dataclass
class Parity:
    results: list[dict]
    wire_bytes: float  # from the sidecars' metrics, for all runs
    raw_bytes: float


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    with servers(nodes=2, shards=2) as cluster:
        sockets = [server.address for server in cluster.sidecars for _ in range(2)]
        job = Job("parity", cluster, tmp_path_factory.mktemp("parity"), sidecar_of=sockets)
        results = job.results(240)
        yield Parity(
            results,
            sum(metric(server, "thalweg_sidecar_wire_bytes_total") for server in cluster.sidecars),
            sum(metric(server, "thalweg_sidecar_raw_bytes_total") for server in cluster.sidecars),
        )


def test_fp32_loss_of_100_steps_equals_plain_ddp(parity):
    # The loss is convex and lr = 1 is below 2/L (L <= 1/2 for inputs of norm 1), so a step does not
    # widen the distance d of two parameter vectors; rounding widens it by lr * e. With u = 2^-24,
    # G = sqrt(2) the bound of a sample's gradient: averaging 4 workers costs each side 4 u G,
    # and the dot products of 1536 terms differ by about sqrt(1536) u G on each side (independent
    # roundings). So d <= 100 * 2 * (4 + 39) * u * G, and the loss differs by at most G * d.
    u, bound = 2.0**-24, 2.0**0.5
    tolerance = bound * 100 * 2 * (4 + 39) * u * bound
    for result in parity.results:
        ours, theirs = result["fp32"]["losses"], result["gloo"]["losses"]
        assert len(ours) == len(theirs) == 100
        assert ours[0] == theirs[0]
        largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"largest difference of the loss {largest:.3g}, tolerance {tolerance:.3g}")
        assert largest < tolerance
        assert theirs[0] - theirs[-1] > 100 * tolerance  # it has learned something


def test_two_fp32_runs_are_bit_identical_whatever_the_order_of_arrival(parity):
    for result in parity.results:
        assert result["fp32"]["digest"] == result["fp32 again"]["digest"]
        assert result["fp32"]["losses"] == result["fp32 again"]["losses"]


@pytest.mark.parametrize("run", ["fp32", "fp32 again", "fp16", "bf16"])
def test_replicas_are_bit_identical(parity, run):
    assert len({result[run]["digest"] for result in parity.results}) == 1


@pytest.mark.parametrize(("run", "ratio"), [("fp32", 1), ("fp16", 2), ("bf16", 2)])
def test_wire_bytes_are_exactly_what_the_codec_says(parity, run, ratio):
    for result in parity.results:
        stats = result[run]["stats"]
        assert stats["raw_bytes"] == 100 * 6 * 256 * 40 * 4
        assert stats["wire_bytes_sent"] * ratio == stats["raw_bytes"]
        assert stats["wire_bytes_received"] * ratio == stats["raw_bytes"]
        assert stats["compression"] == ratio


def test_statistics_are_filled_in(parity):
    for result in parity.results:
        stats = result["fp16"]["stats"]
        assert stats["nonfinite_elems"] == 0
        assert stats["rounds"] >= 100
        for name in ("copy", "reduce", "wire", "total"):
            assert stats[f"{name}_seconds"] > 0


@pytest.mark.parametrize(("run", "digits"), [("fp16", 11), ("bf16", 8)])
def test_narrow_codecs_train_as_well(parity, run, digits):
    # Each transfer rounds to `digits` bits: a relative error of 2^-digits of the gradient, twice.
    tolerance = 100 * 2 * 2 * 2.0**-digits
    for result in parity.results:
        differences = zip(result[run]["losses"], result["gloo"]["losses"], strict=True)
        assert 0 < max(abs(a - b) for a, b in differences) < tolerance


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    with servers(nodes=2, shards=1) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        job = Job("modes", cluster, tmp_path_factory.mktemp("modes"), sidecar_of=sockets)
        yield job.results(180)


@pytest.mark.numeric
def test_every_mode_of_ddp_agrees_with_plain_ddp(modes):
    # With two workers, either side rounds (a + b) / 2 once. What is left are roundings of gradients
    # too small for their type: two units in the last place after four steps.
    for result in modes:
        assert len(result) == 12
        wrong = {mode: ulps for mode, ulps in result.items() if not ulps <= 2}
        assert not wrong


def test_two_models_in_one_process_with_forking_data_loaders(tmp_path):
    with servers(nodes=1, shards=1) as cluster:
        sockets = [cluster.sidecars[0].address] * 2
        results = Job("two_models", cluster, tmp_path, sidecar_of=sockets).results()
    assert results[0]["digests"] == results[1]["digests"]
    assert results[0]["digests"][0] != results[0]["digests"][1]
    for result in results:
        assert result["rounds"] == [12, 12]
        assert result["status"] == [None, None]
