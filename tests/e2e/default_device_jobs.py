"""Jobs whose default device is not that of tensors: `default_device_jobs.py NAME OUT`.

That device is "meta", whose tensors cannot be read. Each job returns whether weights have changed,
and whether they are those of the same training with the CPU as default device.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from local_optimizer_trainers import CASES, make_model
from torch import Tensor, nn

from thalweg.optim import FusedAdamW
from thalweg.ps import LocalOptimizer, ServerOptimizer

STEPS = 7


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(dist.get_rank())
    return [(torch.randn(8, 64), torch.randn(8, 10)) for _ in range(STEPS)]


def losses(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    for inputs, wanted in data:
        model.zero_grad()
        yield nn.functional.mse_loss(model(inputs), wanted)


def local(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> None:
    options, settings = CASES[os.environ["CASE"]]
    inner = FusedAdamW(model.named_parameters(), lr=1e-2)
    optimizer = LocalOptimizer(inner, every=settings.every, **options)
    for loss in losses(model, data):
        loss.backward()
        if options.get("weighted"):
            optimizer.count(1.0)
        optimizer.step()
    optimizer.finish()


def served(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> None:
    optimizer = ServerOptimizer(
        model.named_parameters(), "adamw", lr=1e-2, max_grad_norm=1.0, loss_scaling=True
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for loss in losses(model, data):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert optimizer.clip_grad_norm_(0.1).item() > 0
        scaler.step(optimizer)
        scaler.update()


def both_ways(train: Callable[[nn.Module, Sequence[tuple[Tensor, Tensor]]], None]) -> list[bool]:
    found = []
    for device in (None, "meta"):
        data, model = batches(), make_model(0)
        before = digest(model)
        torch.set_default_device(device)
        train(model, data)
        torch.set_default_device(None)
        found.append(digest(model))
    return [found[0] != before, found[0] == found[1]]


if __name__ == "__main__":
    job_runner.run(lambda name: both_ways({"local": local, "served": served}[name]))
