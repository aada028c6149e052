"""Tests the example that compares local updates of a small GPT with gradients in every step."""

from __future__ import annotations

import json
import re

from example_runs import run_example

SMALL = "--steps 60 --look 20 --width 64 --blocks 1 --batch 4 --length 32 --tests 16"
WAYS = ["ddp", "10", "10:int8:start=0", "10:sparse", "10:signs"]


def test_ways_are_compared_from_the_same_weights_and_their_bytes_are_counted(tmp_path):
    printed = run_example("gpt_local", ["--ways", *WAYS, *SMALL.split()], tmp_path)
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    curves = {run["way"]: run["curve"] for run in runs}
    assert sorted(curves) == sorted(WAYS)
    for way, curve in curves.items():
        losses = [point["loss"] for point in curve]
        assert [point["step"] for point in curve] == [20, 40, 60]
        assert losses[-1] < losses[0] < 5.7  # log 256 is 5.55
        assert re.search(rf"{way} +{losses[-1]:.4f} ", printed), printed
    # The end, which the last one has, is whole.
    sent = {way: curve[1]["sent"] for way, curve in curves.items()}
    assert sent["10"] == sent["ddp"] / 10
    assert 3.5 < sent["10"] / sent["10:int8:start=0"] < 4
    for few in ("10:sparse", "10:signs"):
        assert sent["10"] / sent[few] > 97
        assert curves[few][2]["sent"] > sent["10"] / 4 > sent[few]


def test_muon_and_adamw_exchange_their_parts_of_the_model(tmp_path):
    run_example("gpt_local", ["--inner", "muon", "--ways", "ddp", "10", *SMALL.split()], tmp_path)
    ddp, local = (json.loads((tmp_path / f"{way}-1.json").read_text()) for way in ("ddp", "10"))
    assert local["curve"][-1]["sent"] == ddp["curve"][-1]["sent"] / 10
    for run in (ddp, local):
        losses = [point["loss"] for point in run["curve"]]
        assert losses[-1] < losses[0] < 5.7  # log 256 is 5.55
