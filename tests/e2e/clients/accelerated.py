"""Trains with Hugging Face Accelerate; see common.py. The phase `hooks` tries its own hooks."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from common import Task, data, layers, main, report, seen, with_codec


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


def train_with(hook: DDPCommunicationHookType) -> dict[str, Any]:
    asked = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[asked])
    model = layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
    result = seen(model)
    accelerator.free_memory()
    return result


def try_hooks() -> dict[str, Any]:
    return {
        h.value: with_codec("fp16", lambda h=h: train_with(h)) for h in DDPCommunicationHookType
    }


if __name__ == "__main__":
    if sys.argv[1] == "hooks":
        report("hooks", Path(sys.argv[2]), try_hooks())
    else:
        main(train)
