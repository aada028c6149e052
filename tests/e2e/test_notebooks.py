"""Tests trainings that a notebook starts, whose workers are forked from its kernel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from harness import DEADLINE, environment, free_port, servers
from nbclient import NotebookClient

CLIENTS = Path(__file__).parent / "clients"
TRAIN = """
import json, pathlib, sys
sys.path.insert(0, {clients!r})
import torch
from common import data, layers, seen

def report(module):
    path = pathlib.Path(f"seen{{torch.distributed.get_rank()}}.json")
    path.write_text(json.dumps(seen(module)))
"""
ACCELERATE = """
from accelerate import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator(cpu=True)
    model = layers()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
    report(model)
    accelerator.end_training()

notebook_launcher(train, num_processes=2, use_port={port!r})
"""
LIGHTNING = """
import pytorch_lightning as lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers()
    def training_step(self, batch, _):
        return self.layers(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Look(lightning.Callback):
    def on_train_end(self, trainer, _):
        report(trainer.model)

trainer = lightning.Trainer(
    max_steps=3, devices=2, accelerator="cpu", strategy="ddp_notebook", callbacks=[Look()],
    logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), torch.utils.data.DataLoader(data(), batch_size=2))
"""


@pytest.mark.parametrize("cell", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_workers_that_a_notebook_forks_are_attached(cell, tmp_path, monkeypatch):
    cells = [TRAIN.format(clients=str(CLIENTS)), cell.replace("{port!r}", repr(str(free_port())))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    with servers() as nothing:
        for name, value in environment(nothing.folder).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("THALWEG_CODEC", "fp16")
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(
            notebook, timeout=DEADLINE, kernel_name="python3", resources=resources
        ).execute()
        for left in (*nothing.folder.glob("torchelastic_*"), *nothing.folder.glob("tmp*")):
            shutil.rmtree(left)  # torch's and Lightning's
    found = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    for worker in found:
        assert worker["codec"] == "fp16"
        assert worker["raw"] > 0
    assert found[0]["digest"] == found[1]["digest"]
