"""Jobs of local_optimizer_jobs.py that count what crosses the network."""

import os

import job_runner
import torch
import torch.distributed as dist
from local_optimizer_trainers import Trainer, loss_of, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg.ps import LocalOptimizer


def bytes_sent() -> dict[str, float]:
    """Returns what a node sends in a step: with gradients in each, and with every 50th's."""
    trainer = Trainer(0, 50)
    trainer.train(50)
    before = job_runner.sent_bytes()
    trainer.train(100)
    local = job_runner.sent_bytes() - before
    trainer.optimizer.close()
    model = DistributedDataParallel(make_model(0))
    thalweg.ddp.attach(model)
    before = job_runner.sent_bytes()
    for step in range(100):
        loss_of(model, dist.get_rank(), step).backward()
    return {"local": local / 100, "ddp": (job_runner.sent_bytes() - before) / 100}


def bytes_of_exchange() -> dict[str, float]:
    """Returns what a node sends in two exchanges in fp32 and in CODEC, as the transport counts it;
    and as the optimizer does.
    """
    sent, counted = {}, {}
    for codec in ("fp32", os.environ["CODEC"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 50))
        optimizer = LocalOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), every=1, codec=codec
        )
        before = job_runner.sent_bytes()
        for step in range(2):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 1000, generator=data)).square().mean().backward()
            optimizer.step()
        sent[codec] = job_runner.sent_bytes() - before
        counted[codec] = optimizer.stats()["wire_bytes_sent"]
        optimizer.close()
    elements = sum(parameter.numel() for parameter in model.parameters())
    coded = os.environ["CODEC"]
    return {
        "elements": elements,
        "fp32": sent["fp32"],
        "coded": sent[coded],
        "counted": counted[coded],
    }
