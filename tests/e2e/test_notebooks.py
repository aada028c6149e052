"""Tests trainings that a notebook starts, whose workers are forked from its kernel."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import launching
import nbformat
import pytest
from clients.kernels import Kernels
from harness import DEADLINE, environment, servers
from nbclient import NotebookClient
from ports import free_port

CLIENTS = Path(__file__).parent / "clients"
RUNS = ("plain", "fp32")
TRAIN = """
import json, os, pathlib, sys
sys.path.insert(0, {clients!r})
import torch
from common import data, layers, seen

def report(module):
    name = os.environ["THALWEG_CODEC"] or "plain"
    path = pathlib.Path(f"{{name}}{{torch.distributed.get_rank()}}.json")
    path.write_text(json.dumps(seen(module)))
"""
ACCELERATE = """
from accelerate import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator(cpu=True)
    model = layers()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inputs = data().tensors[0].view(-1, 2, 2, 64)[:, accelerator.process_index]
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(inputs[step]).square().mean())
        optimizer.step()
    report(model)
    accelerator.end_training()

def launch():
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

def launch():
    trainer = lightning.Trainer(
        max_steps=3, devices=2, accelerator="cpu", strategy="ddp_notebook", callbacks=[Look()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Model(), torch.utils.data.DataLoader(data(), batch_size=2))
"""
LAUNCH = """
for codec in ("", "fp32"):
    os.environ["THALWEG_CODEC"] = codec
    launch()
"""


@pytest.mark.parametrize("cell", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_workers_that_a_notebook_forks_train_as_with_plain_ddp(cell, tmp_path, monkeypatch):
    cells = [TRAIN.format(clients=str(CLIENTS)), cell.replace("{port!r}", repr(str(free_port())))]
    cells.append(LAUNCH)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    with servers() as nothing:
        for name, value in environment(nothing.folder).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("THALWEG_CODEC", "fp32")
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(
            notebook, timeout=2 * DEADLINE, kernel_manager_class=Kernels, resources=resources
        ).execute()
        for left in (*nothing.folder.glob("torchelastic_*"), *nothing.folder.glob("tmp*")):
            shutil.rmtree(left)  # torch's and Lightning's
    for rank in (0, 1):
        plain, whole = (json.loads((tmp_path / f"{n}{rank}.json").read_text()) for n in RUNS)
        assert plain["codec"] is None
        assert whole["codec"] == "fp32"
        assert whole["raw"] > 0
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert whole["digest"] == plain["digest"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_notebooks_on_two_nodes_of_which_a_worker_is_killed_go_on_as_if_undisturbed(tmp_path):
    output = launching.run(
        lambda node, port: [sys.executable, str(CLIENTS / "notebook.py"), str(node), str(port)],
        ["killed", str(tmp_path)],
        tmp_path,
        {"THALWEG_CODEC": "fp32", "THALWEG_RESIDUALS": str(tmp_path / "kept"), **launching.STORES},
    )
    assert (tmp_path / "died").exists()
    # Once before the kill, and once after it.
    assert output.count("the codec goes on after step 8, from the optimizer's checkpoint") == 2
    found = [json.loads((tmp_path / f"killed{rank}.json").read_text()) for rank in range(4)]
    for worker in found:
        assert worker["resumes"]["digest"] == found[0]["whole"]["digest"]
        assert 0 < worker["resumes"]["sent"] < worker["resumes"]["raw"] / 2  # both steps
