"""Tests timm's own train.py, which its package does not contain:
TIMM_TRAIN=…/train.py python -m pytest tests/e2e/test_timm_script.py
"""

from __future__ import annotations

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


def train(folder, name, codec, *options):
    """Returns the last checkpoint and the output."""
    arguments = [str(RUNNER), str(Path(SCRIPT).resolve()), "data", *OPTIONS, *options]
    arguments += ["--experiment", name]
    env = {"THALWEG_CODEC": codec} if codec else {}
    output = launching.run(launching.torchrun, arguments, folder, env)
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
    codec = "powersgd:rank=1,start=4"
    train(tmp_path, "saved", codec, *options)
    options = ["--opt", optimizer, "--epochs", "3", "--resume", "saved/last.pth.tar"]
    resumed, said = train(tmp_path, "resumed", codec, *options)
    assert resumed["epoch"] == 2
    assert said.count(f"the codec goes on after step {STEPS}, from the optimizer's") == 1
