"""A script as they were written for apex; it knows nothing of what serves it.

Usage: apex_script.py LEVEL FILE: trains 20 steps with a checkpoint in between.
"""

import sys

import torch
from apex import amp
from apex.fp16_utils import network_to_half
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import DistributedDataParallel as DDP  # noqa: F401
from apex.parallel import SyncBatchNorm, convert_syncbn_model
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def build(level):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    return loss.item()


inputs = torch.randn(64, 1, 8, 8, device=device)
labels = inputs.view(64, 4, 16).sum(dim=2).argmax(dim=1)

model, optimizer = build(sys.argv[1])
first = train(model, optimizer, 1)
train(model, optimizer, 9)
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()},
    sys.argv[2],
)
straight = train(model, optimizer, 10)

model, optimizer = build(sys.argv[1])
checkpoint = torch.load(sys.argv[2])
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
resumed = train(model, optimizer, 10)

assert resumed == straight, (resumed, straight)
assert straight < first / 2, (first, straight)
assert isinstance(FusedSGD(model.parameters(), 0.1), torch.optim.SGD)
assert isinstance(FusedLAMB(model.parameters()), torch.optim.Optimizer)
assert network_to_half(nn.Linear(1, 1)).to(device)(inputs[:, 0, 0, :1]).dtype is torch.float16
assert isinstance(convert_syncbn_model(nn.BatchNorm1d(1)), SyncBatchNorm)
print(f"trained: {first:.3f} to {straight:.3f}")
