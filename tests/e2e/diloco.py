"""Does in one process what workers with a LocalOptimizer do: DiLoCo, step by step.

One process has a model and an optimizer for each worker, and a further model for the shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Mean = Callable[[str, Sequence[Tensor]], Tensor]


def plain_mean(_: str, changes: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(changes)).sum(0) / len(changes)


@dataclass
class Settings:
    """What LocalOptimizer is told."""

    every: int
    leaves_at: Sequence[int] = ()  # of the steps of an interval, by fragment
    fragments: Sequence[Sequence[str]] = ()  # names of parameters
    delay: int = 0
    mix: float = 0.0
    shares: Sequence[float] = ()  # of the workers in the mean; empty: equal ones
    pull: torch.dtype = torch.float32  # in what weights come
    # Makes what takes the mean of a parameter's changes, by name.
    mean: Callable[[], Mean] = lambda: plain_mean


@dataclass
class DiLoCo:
    """Workers, and the weights that they had in common last."""

    settings: Settings
    workers: Sequence[nn.Module]
    inner: Sequence[Optimizer]
    whole: nn.Module
    outer: Optimizer
    loss: Callable[[nn.Module, int, int], Tensor]  # of a model, a rank and a step
    step: int = 0
    pending: list[tuple[int, str, list[Tensor]]] = field(default_factory=list)
    last: dict[str, Tensor] = field(default_factory=dict)  # weights as they have come

    @torch.no_grad()
    def __post_init__(self) -> None:
        self._mean = self.settings.mean()
        self._left: dict[str, int] = {}  # the step after which each parameter has left last
        for name, whole in self.whole.named_parameters():
            self.last[name] = whole.to(self.settings.pull, copy=True).float()
            for worker in self.workers:
                worker.get_parameter(name).copy_(self.last[name])

    def train(self, steps: int) -> None:
        """Does so many steps of all workers."""
        for _ in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.workers, self.inner, strict=True)):
                optimizer.zero_grad()
                self.loss(model, rank, self.step).backward()
                optimizer.step()
            self.step += 1
            self._exchange()

    @torch.no_grad()
    def finish(self) -> None:
        """Exchanges what workers have changed since the last time, and then takes the mean of their
        weights, by their shares.
        """
        self._land(all_=True)
        names = [name for name, _ in self.whole.named_parameters()]
        self._update([name for name in names if self._left[name] < self.step])
        for _, name, targets in self.pending:
            rests = self._shared([self.last[name] - target for target in targets])
            mean = plain_mean(name, rests)
            self.whole.get_parameter(name).sub_(mean)
        for name in names:
            for worker in self.workers:
                worker.get_parameter(name).copy_(self.whole.get_parameter(name))

    @torch.no_grad()
    def _exchange(self) -> None:
        every = self.settings.every
        names = [name for name, _ in self.whole.named_parameters()]
        fragments = self.settings.fragments or [names]
        self._land()
        for part, leaves_at in zip(fragments, self.settings.leaves_at or [every], strict=True):
            if self.step % every == leaves_at % every:
                self._update(part)
        self._land()

    def _update(self, part: Sequence[str]) -> None:
        self.outer.zero_grad()  # who has no gradient stays
        rests_of: dict[str, list[Tensor]] = {}
        for name in part:
            whole = self.whole.get_parameter(name)
            last = self.last[name]
            changes = [last - worker.get_parameter(name) for worker in self.workers]
            whole.grad = self._mean(name, self._shared(changes))
            rests = list(getattr(self._mean, "rests", ()))
            if rests and self.settings.shares:
                pairs = zip(self.settings.shares, rests, strict=True)
                rests = [rest / (share * len(self.workers)) for share, rest in pairs]
            rests_of[name] = rests
        self.outer.step()
        for name in part:
            new = self.whole.get_parameter(name).to(self.settings.pull, copy=True).float()
            self.last[name] = new
            self._left[name] = self.step
            rests = rests_of[name] or [torch.zeros_like(new)] * len(self.workers)
            targets = [new - rest for rest in rests]
            self.pending.append((self.step + self.settings.delay, name, targets))

    def _shared(self, changes: list[Tensor]) -> list[Tensor]:
        """Returns what the changes of the workers count in the mean."""
        if not self.settings.shares:
            return changes
        pairs = zip(self.settings.shares, changes, strict=True)
        return [share * len(self.workers) * change for share, change in pairs]

    def _land(self, *, all_: bool = False) -> None:
        for due, name, targets in self.pending:
            if all_ or due == self.step:
                for worker, target in zip(self.workers, targets, strict=True):
                    own = worker.get_parameter(name)
                    own.copy_(torch.lerp(own, target, 1 - self.settings.mix))
        self.pending = [] if all_ else [each for each in self.pending if each[0] != self.step]
