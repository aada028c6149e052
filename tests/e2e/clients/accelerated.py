"""Trains with Hugging Face Accelerate; see common.py."""

from typing import Any

import torch
from accelerate import Accelerator
from common import Task, data, layers, main, seen


def train(task: Task) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if task.resumes:
        accelerator.load_state(str(task.folder))
        done = 8
        loader = accelerator.skip_first_batches(loader, done)
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        if done == task.steps:
            break
    if task.saves:
        accelerator.save_state(str(task.folder))
    result = seen(model)
    accelerator.free_memory()
    return result


if __name__ == "__main__":
    main(train)
