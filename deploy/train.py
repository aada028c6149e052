"""An ordinary DistributedDataParallel script on generated data. It does not mention Thalweg.

    torchrun --nproc-per-node=2 train.py [--steps N]

Trains on GPUs where there are any, with NCCL, else on CPUs with Gloo. Rank 0 prints the loss every
tenth step; at the end all ranks compare their parameters, and the exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build(device: torch.device) -> DistributedDataParallel:
    """Builds a perceptron of 1.6 million parameters, the same on all ranks."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return DistributedDataParallel(layers.append(nn.Linear(1024, 10)).to(device))


def train(model: DistributedDataParallel, device: torch.device, steps: int) -> None:
    """Trains. The label of a row of numbers is the index of the largest among its first ten."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, steps + 1):
        inputs = torch.randn(64, 512, generator=data)
        labels = inputs[:, :10].argmax(1).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == steps):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def check_replicas(model: DistributedDataParallel) -> None:
    """Raises RuntimeError unless all ranks have the bits of rank 0."""
    ours = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = ours.clone()
    dist.broadcast(first, 0)
    if not torch.equal(ours, first):
        raise RuntimeError(f"rank {dist.get_rank()} has other parameters than rank 0")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    model = build(device)
    train(model, device, steps)
    check_replicas(model)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} replicas are bit-identical", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
