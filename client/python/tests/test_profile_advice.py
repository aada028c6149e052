"""Tests what `thalweg profile` advises, from made-up measurements."""

from dataclasses import replace

import pytest

from thalweg.cli import _profile_advice as advice
from thalweg.cli._profile_advice import Measured, Tensor
from thalweg.cli._profile_exchange import Exchange
from thalweg.codecs import FP16, FP32, Int8, PowerSGD

MATRIX, BIAS = Tensor((1000, 1000), 4), Tensor((1000,), 4)
PHASES = {"data": 0.0, "forward": 0.1, "backward": 0.2, "wait": 0.3, "optimizer": 0.0, "other": 0.0}
# A ring of 4 workers carries 2 * 3 / 4 of 4 MB, which takes 0.48 s at 100 Mbit/s.
MEASURED = Measured(
    phases=PHASES,
    straggling=0.0,
    gradients=[MATRIX],
    workers=4,
    nodes=4,
    rate=100e6,
    exchange=Exchange("averaged"),
    sent_bytes=0.0,
    optimizers=["torch.optim.adamw.AdamW"],
)


def test_bytes_of_codecs_follow_their_rules():
    both = [MATRIX, BIAS]
    assert advice.wire_bytes(FP32(), both) == 4 * 1_001_000
    assert advice.wire_bytes(FP16(), both) == 2 * 1_001_000
    assert advice.wire_bytes(Int8(), both) == pytest.approx(0.256 * 4 * 1_001_000)
    assert advice.wire_bytes(PowerSGD(rank=4), both) == 4 * (2000 * 4 + 1000)
    # Factors that are not half as large are not made.
    assert advice.wire_bytes(PowerSGD(rank=4), [Tensor((8, 8), 4)]) == 4 * 64


def test_links_carry_a_ring_or_what_thalweg_counts():
    assert advice.link_bytes(MEASURED) == 6e6
    assert (
        advice.link_bytes(
            replace(MEASURED, exchange=Exchange("averaged", codec="fp16"), sent_bytes=1e6)
        )
        == 1e6
    )


def test_wait_shrinks_by_what_the_link_no_longer_carries():
    # 0.18 s of the exchange are hidden now, and stay so.
    compute = 0.1e-9 * 4e6
    assert advice.predicted_wait(MEASURED, FP16()) == pytest.approx(0.24 - 0.18 + compute)
    # Factors take less than what is hidden; what remains is computing them.
    assert advice.predicted_wait(MEASURED, PowerSGD(rank=4)) == pytest.approx(0.5e-9 * 4e6)


def test_nothing_shortens_the_wait_for_slow_workers():
    slow = replace(MEASURED, straggling=0.3)
    assert advice.predicted_wait(slow, PowerSGD(rank=4)) > 0.3
    assert advice.advise(slow) == ["communication 50%: no other codec would save 5 % at 100 Mbit/s"]


def test_best_codec_is_named_with_what_it_saves_the_rate_and_a_milder_one():
    # 0.04 s are hidden; the wait of 0.44 s of 0.74 becomes 2 ms.
    exposed = replace(MEASURED, phases={**PHASES, "wait": 0.44})
    assert advice.advise(exposed) == [
        "communication 59%: powersgd rank 4 would save 59% at 100 Mbit/s (int8: 48%)"
    ]


def test_codec_in_use_is_not_advised():
    used = replace(
        MEASURED, exchange=Exchange("averaged", codec="powersgd:rank=4,start=2"), sent_bytes=36e3
    )
    assert advice.advise(used) == ["communication 50%: no other codec would save 5 % at 100 Mbit/s"]


def test_advice_for_another_rate_supposes_all_hidden_that_can_be():
    fast = replace(MEASURED, rate=10e9, phases={**PHASES, "wait": 0.01})
    slower = advice.at_rate(fast, 50e6)
    assert slower.rate == 50e6
    assert slower.phases["wait"] == pytest.approx(0.96 - 0.2)
    assert advice.advise(slower)[0].startswith("communication 72%: powersgd rank 4 would save 72%")


def test_one_node_needs_no_codec():
    assert advice.advise(replace(MEASURED, nodes=1, rate=None)) == [
        "communication 50%: all workers are on one node, where no codec helps"
    ]


def test_late_data_and_long_updates_are_named_most_effective_first():
    late = replace(MEASURED, phases={**PHASES, "data": 0.2, "wait": 0.0, "optimizer": 0.5})
    first, second = advice.advise(replace(late, fused_update=0.1))
    assert first.startswith("optimizer 50%: THALWEG_FUSED_OPTIMIZER=1")
    assert first.endswith("would save 40%")
    assert second.startswith("data 20%: more num_workers")
    second, first = advice.advise(replace(late, fused_update=0.35))
    assert first.endswith("would save 15%")
    assert second.startswith("data 20%: more num_workers")


@pytest.mark.parametrize("fused", [None, 0.47, 0.6])
def test_update_that_fusing_would_not_shorten_is_left_alone(fused):
    late = replace(MEASURED, phases={**PHASES, "wait": 0.0, "optimizer": 0.5}, fused_update=fused)
    assert advice.advise(late) == ["optimizer 62%: nothing that Thalweg does would help"]


def test_training_that_computes_is_left_alone():
    computing = replace(MEASURED, phases={**PHASES, "backward": 2.0, "wait": 0.01})
    assert advice.advise(computing) == ["backward 95%: nothing that Thalweg does would help"]


@pytest.mark.parametrize("kind", ["served", "local"])
def test_nothing_is_said_of_averaging_where_no_gradients_are_averaged(kind):
    phases = {**PHASES, "wait": 0.44, "optimizer": 2.0}
    other = replace(MEASURED, exchange=Exchange(kind), phases=phases, fused_update=0.1)
    expected = ["optimizer 73%: nothing more that Thalweg does would help"]
    assert advice.advise(other) == advice.advise(advice.at_rate(other, 1e6)) == expected
