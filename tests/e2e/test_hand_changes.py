"""Tests what becomes of parameters that scripts change by hand while shards keep weights."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

run = functools.partial(on_nodes.run, Path(__file__).parent / "hand_changes_jobs.py")


@pytest.mark.parametrize("pull", ["fp32", "bf16", "int8", "onebit"])
def test_change_that_torch_does_not_count_is_published_and_other_weights_lose_nothing(
    pull, tmp_path
):
    first, _ = run("published_data", tmp_path, (1, 1), 0, PULL=pull)
    assert first == {"published": True, "others stay": True}


@pytest.mark.parametrize("how", ["close", "collect"])
def test_weights_of_the_last_step_are_there_when_the_optimizer_has_gone(how, tmp_path):
    for to_torch, to_the_step_before in run(
        "left_with_the_last_step", tmp_path, (1, 1), 0, HOW=how
    ):
        assert to_torch < 1e-6
        assert to_the_step_before > 1e-4


def test_change_that_the_last_weights_would_overwrite_is_refused_when_the_optimizer_is_closed(
    tmp_path,
):
    text = "0.weight has been changed while its new weights were on their way"
    ends = run("closed_over_a_change", tmp_path, (1, 1), 0)
    assert any(text in refused for refused, _ in ends)
    for refused, again in ends:
        # Whoever is refused leaves: then the other's weights may not come, and nothing overwrites.
        assert text in refused or refused == "no error"
        assert again == "no error"


@pytest.mark.parametrize("mode", ["stale", "async"])
def test_finish_of_nodes_that_are_apart_takes_no_change_back(mode, tmp_path):
    refused = []
    for published, kept, error, weight in run(
        "changed_before_the_end", tmp_path, (1, 1), 0, MODE=mode
    ):
        assert (published, kept, weight) == ("no error", 3.0, 3.0)
        assert "RuntimeError: " in error
        refused.append(" has been changed since the last step, and the shards do not" in error)
    assert any(refused)  # one may hear first that the other has left


def test_weights_are_loaded_into_views_of_a_tensor_that_travel_apart(tmp_path):
    for result in run("loaded_into_views", tmp_path, (1, 1), 0):
        assert result == ["no error", True, "no error", True]


@pytest.mark.parametrize(
    "codec",
    ["topk:ratio=0.01,start=0", "int8:start=0", "onebit:start=0", "powersgd:rank=1,start=0"],
)
def test_nothing_that_a_codec_holds_back_comes_after_weights_were_published(codec, tmp_path):
    largest = run("published_over_what_is_held_back", tmp_path, (2, 1), 0, CODEC=codec)
    assert max(largest) < 1e-5  # three steps of 1e-6


@pytest.mark.parametrize("how", ["load", "publish"])
@pytest.mark.parametrize("codec", ["int8:start=0", "onebit:start=0", "topk:ratio=0.1,start=0"])
def test_nothing_of_exploded_gradients_comes_after_going_back(codec, how, tmp_path):
    environment = {"CODEC": codec, "HOW": how}
    moved = run("gone_back_after_an_explosion", tmp_path, (1, 1), 0, **environment)
    assert max(moved) < 0.1  # three means of gradients of 1e-3
