"""Jobs that train in mixed precision through Thalweg: `amp_jobs.py NAME OUT`."""

import os
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import job, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.compat
import thalweg.ddp
from thalweg import amp


class Product(nn.Module):
    """w·x: for small integers, everything is exact in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def inputs(first: float, second: float) -> torch.Tensor:
    """Gives rank 0 the mean times the number of workers, and the others nothing."""
    scale = dist.get_world_size() if dist.get_rank() == 0 else 0
    return torch.tensor([first, second]) * scale


@job
def native_scaler() -> dict[str, Any]:
    """Runs O2 under torch's GradScaler, with accumulation and clipping; gradients cross as fp16."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.cuda.amp.aiak_amp_decorate(model, optimizer, loss_scale=64.0)
    module = DistributedDataParallel(model)
    thalweg.ddp.attach(module, "fp16")
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        with module.no_sync():
            scaler.scale(module(inputs(1.0, 2.0))).backward()
        scaler.scale(module(inputs(1.0, 1.0))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(torch.cuda.amp.aiak_amp_parameters(optimizer), 1e6)
        scaler.step(optimizer)
        scaler.update()
    return {"weights": model.state_dict()["weight"].tolist()}


@job
def overflows() -> dict[str, Any]:
    """Runs torch's GradScaler with too large a first scale; attached by the environment or here."""
    module = DistributedDataParallel(Product())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    if "THALWEG_ENABLE" not in os.environ:
        thalweg.ddp.attach(module, "fp32")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    made = 0
    for first in (1.0, 1e34, 1e34, 1.0):  # at 2**15 the gradient overflows float32
        optimizer.zero_grad()
        scaler.scale(module(inputs(first, 1.0))).backward()
        before = module.module.weight.tolist()
        scaler.step(optimizer)
        made += module.module.weight.tolist() != before
        scaler.update()
    state = thalweg.ddp.state_of(module)
    assert state is not None
    return {"scale": scaler.get_scale(), "made": made, "stats": state.stats()}


@job
def own_scale() -> dict[str, Any]:
    """Runs O2 with scale_loss, from another seed on each worker."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    module = DistributedDataParallel(model)
    thalweg.ddp.attach(module, "fp16")
    losses = []
    for step in range(40):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(32, 8, generator=data)
        optimizer.zero_grad()
        loss = (module(x) - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    masters = nn.ParameterList([nn.Parameter(p.detach()) for p in amp.master_params(optimizer)])
    return {"digest": [digest(model), digest(masters)], "losses": losses}


if __name__ == "__main__":
    main()
