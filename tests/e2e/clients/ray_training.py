"""Trains with Ray Train's TorchTrainer: `ray_training.py FOLDER SOCKET0 SOCKET1`.

Two nodes of a Ray cluster on this machine, with one worker and one sidecar each, train with plain
DDP, with codec fp32, and with PowerSGD, where a worker is killed after a checkpoint and Ray starts
the workers again, and once more without a break. Every training writes NAME<rank>.json; see
common.py.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from common import POWERSGD, SAVED_AT, await_residuals, data, layers, seen
from ray.cluster_utils import Cluster

STEPS, DIES_AT = 12, 10


def train(options: dict[str, Any]) -> None:
    os.environ["THALWEG_CODEC"] = options["codec"]  # read when the module is wrapped
    residuals = Path(options["folder"]) / "residuals"
    if options["dies"]:
        os.environ["THALWEG_RESIDUALS"] = str(residuals)
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(options["folder"])
    model = ray.train.torch.prepare_model(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done, batches = 0, data().tensors[0].view(-1, 2, 2, 64)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            saved = torch.load(Path(path) / "state.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    began = done
    while done < options["steps"]:
        optimizer.zero_grad()
        model(batches[done, rank]).square().mean().backward()
        optimizer.step()
        done += 1
        if done == SAVED_AT and options["dies"]:
            save(folder, {"model": model.module, "optimizer": optimizer}, done)
        note = folder / "died"
        if done == DIES_AT and options["dies"] and rank == 1 and not note.exists():
            note.touch()
            assert await_residuals(residuals, SAVED_AT)
            os.kill(os.getpid(), signal.SIGKILL)
    result = {"began": began, **seen(model)}
    (folder / f"{options['name']}{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def save(folder: Path, parts: dict[str, Any], done: int) -> None:
    """Reports a checkpoint to Ray, from rank 0; all workers report."""
    checkpoint = None
    if ray.train.get_context().get_world_rank() == 0:
        target = folder / "reported"
        target.mkdir(exist_ok=True)
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "done": done}, target / "state.pt")
        checkpoint = ray.train.Checkpoint.from_directory(target)
    ray.train.report({"done": done}, checkpoint=checkpoint)
    ray.train.get_all_reported_checkpoints()  # waits until Ray would resume from it


def fit(name: str, codec: str, steps: int, folder: str, *, dies: bool = False) -> None:
    options = {"name": name, "codec": codec, "steps": steps, "folder": folder, "dies": dies}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(Path(folder) / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    trainer.fit()


def main(folder: str, *sockets: str) -> None:
    cluster = Cluster()
    for socket in sockets:
        # Ray starts a node's workers with its variables; Thalweg takes it for a node of its own.
        cluster.add_node(
            num_cpus=2,
            env_vars={"THALWEG_SIDECAR": socket},
            **({} if cluster.head_node else {"include_dashboard": False}),
        )
    # A variable must be set when torch is imported; the trainings then choose others.
    variables = {"THALWEG_CODEC": "fp32"}
    ray.init(address=cluster.address, runtime_env={"env_vars": variables})
    fit("plain", "", 6, folder)
    fit("fp32", "fp32", 6, folder)
    fit("resumed", POWERSGD, STEPS, folder, dies=True)
    fit("undisturbed", POWERSGD, STEPS, folder)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
