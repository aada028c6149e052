"""Tests timm's own train.py, which its package does not contain:
TIMM_TRAIN=…/train.py python -m pytest tests/e2e/test_timm_script.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import launching
import numpy as np
import pytest
import torch
from PIL import Image

SCRIPT = os.environ.get("TIMM_TRAIN", "")
RUNNER = Path(__file__).parent / "clients" / "timm_on_cpu.py"
STEPS = 16  # of two epochs
CODEC = "powersgd:rank=1,start=4"
OPTIONS = ["--device", "cpu", "--batch-size", "4", "--lr", "0.01", "--no-aug"]
OPTIONS += ["--warmup-epochs", "0", "--cooldown-epochs", "0", "--workers", "0", "--output", "."]
OPTIONS += ["--model", "vit_tiny_patch16_224", "--img-size", "32", "--num-classes", "4"]
OPTIONS += ["--model-kwargs", "img_size=32", "embed_dim=64", "depth=1", "num_heads=2"]

pytestmark = [
    pytest.mark.skipif(not SCRIPT, reason="TIMM_TRAIN does not name timm's train.py"),
    pytest.mark.timeout(600),
]


def draw(folder):
    """Writes 64 pictures for training and 16 for validation, in four classes."""
    random = np.random.default_rng(0)
    for name, count in (("train", 16), ("validation", 4)):
        for label in range(4):
            target = folder / "data" / name / str(label)
            target.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(target / f"{number}.png")


def train(folder, name, codec, *options, launcher=launching.torchrun, env=()):
    """Returns the last checkpoint and the output."""
    arguments = [str(RUNNER), str(Path(SCRIPT).resolve()), "data", *OPTIONS, *options]
    arguments += ["--experiment", name]
    variables = dict(env) | ({"THALWEG_CODEC": codec} if codec else {})
    output = launching.run(launcher, arguments, folder, variables)
    return torch.load(folder / name / "last.pth.tar", weights_only=False), output


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_timms_script_trains_as_with_plain_ddp_and_resumes_compressed(optimizer, tmp_path):
    draw(tmp_path)
    options = ["--opt", optimizer, "--epochs", "2"]
    plain, said = train(tmp_path, "plain", "", *options)
    assert "thalweg" not in said
    whole, said = train(tmp_path, "whole", "fp32", *options)
    assert "is attached as job-" in said
    # Two workers: (a + b) / 2 is rounded once by either side.
    assert plain["state_dict"].keys() == whole["state_dict"].keys()
    for name, value in plain["state_dict"].items():
        assert torch.equal(value, whole["state_dict"][name]), name
    train(tmp_path, "saved", CODEC, *options)
    options = ["--opt", optimizer, "--epochs", "3", "--resume", "saved/last.pth.tar"]
    resumed, said = train(tmp_path, "resumed", CODEC, *options)
    assert resumed["epoch"] == 2
    assert said.count(f"the codec goes on after step {STEPS}, from the optimizer's") == 1


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_timms_script_killed_under_torchrun_goes_on_compressed_as_if_undisturbed(
    optimizer, tmp_path
):
    draw(tmp_path)
    env = {"DIES_AFTER": str(STEPS), "RESUMES_FROM": "killed/last.pth.tar", **launching.STORES}
    env |= {"THALWEG_RESIDUALS": str(tmp_path / "residuals")}
    options = ["--opt", optimizer, "--epochs", "3"]
    last, said = train(
        tmp_path,
        "killed",
        CODEC,
        *options,
        launcher=lambda node, port: launching.torchrun_restarting(node, port, restarts=1),
        env=env,
    )
    assert (tmp_path / "died").exists()
    assert last["epoch"] == 2
    assert said.count(f"the codec goes on after step {STEPS}, from the optimizer's") == 1
    found = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    for worker in found:
        assert 0 < worker["sent"] < worker["raw"] / 2  # all eight steps
    assert found[0]["digest"] == found[1]["digest"]
    assert said.count("what nodes held back of gradients goes on, from files") == 1
    whole, _ = train(tmp_path, "whole", CODEC, *options)
    # The script's workers do not wait for each other at a checkpoint: node 1's file may be of the
    # next step, and then the weights are others.
    late = f"-{STEPS}-node1" not in (tmp_path / "died").read_text()
    for name, value in whole["state_dict"].items():
        assert late or torch.equal(value, last["state_dict"][name]), name
    print("node 1's file was one step late" if late else "the weights are those undisturbed")
    print(f"{optimizer}: {found[0]['raw']} bytes of gradients crossed as {found[0]['sent']}")
