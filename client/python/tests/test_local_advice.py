"""Tests how often workers are advised to exchange, by time lines that are added up."""

import math
from dataclasses import replace

import pytest
from test_profile_advice import MEASURED, PHASES

from thalweg.cli import _local_advice as local
from thalweg.cli import _profile_advice as advice


@pytest.mark.parametrize("step", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("exchange", [1e-4, 0.5, 40.0])
@pytest.mark.parametrize("lost", [0.01, 0.05, 0.5])
def test_least_interval_loses_no_more_and_a_shorter_one_does(step, exchange, lost):
    def waiting(every: int) -> float:
        return exchange / (every * step + exchange)

    every = local.least_every(exchange, step, lost)
    assert waiting(every) <= lost * (1 + 1e-9)
    assert every == 1 or waiting(every - 1) > lost


def test_exchange_of_two_nodes_takes_half_of_the_bytes_over_each_link_and_way():
    # Each node hosts half of the weights, and has the changes and the weights of the other half.
    assert local.exchange_seconds(4e6, 2e6, 2, 50e6) == pytest.approx(8 * (2e6 + 1e6) / 50e6)


def test_interval_is_advised_where_no_codec_is_fast_enough():
    # An exchange of 4 MB both ways by 3/4 takes 48 s at 1 Mbit/s, and a step 0.25 s without.
    slow = replace(MEASURED, rate=1e6, phases={**PHASES, "forward": 0.0625, "backward": 0.1875})
    assert local.exchange_seconds(4e6, 4e6, 4, 1e6) == pytest.approx(48.0)
    every = math.ceil(48 * 0.95 / (0.05 * 0.25))
    # Rank 4's factors of 32 kB take 0.384 s, of which a backward pass hides 0.1875 s.
    assert advice.advise(slow)[-1] == (
        "no codec leaves less than 44% of a step to communication: thalweg.ps.LocalOptimizer with "
        f"every={every} leaves 5%, by training differently (docs/parameter-server.md)"
    )
    assert "LocalOptimizer" not in "".join(advice.advise(MEASURED))


def test_words_have_the_numbers_of_the_formula():
    # 50 MB up and down by a half each take 8 s at 50 Mbit/s; 95 % of the time is 152 s of 160.
    assert local.describe(50e6, 0.5, 2, 50e6) == (
        "steps took 0.5 s here; to exchange 50 MB takes 8 s with 2 nodes at 50 Mbit/s: without a "
        "codec that is 16 times a step, and local updates (thalweg.ps.LocalOptimizer) with "
        "every=304 lose 5% of the time"
    )
    assert local.describe(50e6, 0.5, 2, 100e9).endswith("which every step may do")
    assert "one node" in local.describe(50e6, 0.5, 1, 50e6)
