"""Trains as timm's train.py does, with its model, optimizer and checkpoints; see common.py."""

import argparse
from typing import Any

import timm
import torch
from common import Task, main, seen
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, init_distributed_device
from torch.nn.parallel import DistributedDataParallel

OPTIMIZER = "lamb"
CLASSES = 10


def train(task: Task) -> dict[str, Any]:
    options = argparse.Namespace(device="cpu", model="vit", opt=OPTIMIZER)
    if not torch.distributed.is_initialized():
        init_distributed_device(options)
    torch.manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=64, depth=1, num_heads=2, num_classes=CLASSES
    )
    optimizer = create_optimizer_v2(model, opt=OPTIMIZER, lr=0.01)
    done = 0
    if task.resumes:
        done = resume_checkpoint(model, str(task.folder / "last.pth.tar"), optimizer) or 0
    wrapped = DistributedDataParallel(model)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(task.steps):
        images = torch.randn(2, 3, 32, 32, generator=generator)
        targets = torch.randint(CLASSES, (2,), generator=generator)
        if step < done:
            continue
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(images), targets).backward()
        optimizer.step()
    if task.saves and rank == 0:
        task.folder.mkdir()
        saver = CheckpointSaver(
            model=model, optimizer=optimizer, args=options, checkpoint_dir=str(task.folder)
        )
        saver.save_checkpoint(epoch=task.steps - 1)  # resume_checkpoint() returns the next one
    return seen(wrapped)


if __name__ == "__main__":
    main(train)
