"""Models whose optimizers are on the shards, beside ones that a single process trains."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from thalweg.ps import ServerOptimizer

STEPS = 7
SETTINGS = {"lr": 0.1, "momentum": 0.9}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4))


def make_attention() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(12, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(36, 12), layer, nn.Linear(12, 4))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randn(8, 3, 6, 6, generator=data)).square().mean()
    return loss


class Pair:
    """A model whose optimizer is on the shards, and one that a single process trains."""

    def __init__(self, make: Callable[[], nn.Module] = make_model, **options: float) -> None:
        self.ours, self.torchs, self.first = make(), make(), make()
        self.optimizer = self.serve(**options)
        self.torch_optimizer = torch.optim.SGD(self.torchs.parameters(), **SETTINGS)

    def serve(self, **options: float) -> ServerOptimizer:
        return ServerOptimizer(self.ours.named_parameters(), "sgd", **(SETTINGS | options))

    def step_both(self, step: int, *, create_graph: bool = False) -> None:
        """Lets each worker, and torch for all of them, take a step with this step's gradients."""
        self.optimizer.zero_grad()
        loss_of(self.ours, step, dist.get_rank()).backward(create_graph=create_graph)
        self.optimizer.step()
        self.step_of_torch([step])

    def step_of_torch(self, steps: list[int], clip: tuple[float, ...] = ()) -> list[float]:
        """Takes a step with the sums of these steps' gradients; returns the norms that it had."""
        workers = dist.get_world_size()
        self.torch_optimizer.zero_grad()
        for step in steps:
            for rank in range(workers):
                (loss_of(self.torchs, step, rank) / workers).backward()
        norms = [float(nn.utils.clip_grad_norm_(self.torchs.parameters(), bound)) for bound in clip]
        self.torch_optimizer.step()
        return norms

    def differences(self) -> tuple[float, float]:
        return distance(self.ours, self.torchs), distance(self.first, self.torchs)


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
