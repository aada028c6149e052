"""Trains with torch.compile: of the wrapped module, and for the checkpoint of the module inside.

See common.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import Task, layers, main, seen
from torch.nn.parallel import DistributedDataParallel

BACKEND = "aot_eager"  # all of the compiler but its code generator, which takes half a minute


def train(task: Task) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    has_checkpoint = task.saves or task.resumes
    inner = layers()
    if has_checkpoint:
        inner = torch.compile(inner, backend=BACKEND)
    model: torch.nn.Module = DistributedDataParallel(inner)
    if not has_checkpoint:
        model = torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = 0
    if task.resumes:
        saved = torch.load(task.folder)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    while done < task.steps:
        optimizer.zero_grad()
        model(torch.randn(2, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        done += 1
    if task.saves and dist.get_rank() == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        torch.save(parts, task.folder)
    return seen(model)


if __name__ == "__main__":
    main(train)
