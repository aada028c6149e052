"""A sampler for workers whose number changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler


class Sampler(TorchSampler[int]):
    """Gives each worker its part of what is left of an epoch.

    Like torch's DistributedSampler it shuffles alike on all workers, and pads the end so that all
    have as many samples. Unlike it, it knows what has been used: call `took(samples)` after each
    step with the number of samples of this worker, which must be the same on all. Then an epoch
    goes on with other workers where it was, and uses every sample once, those of padding twice.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        """`dataset` has a length, the same on all workers."""
        self._size = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._used = 0  # of the epoch's samples, by all workers

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it has begun already."""
        if epoch != self._epoch:
            self._epoch, self._used = epoch, 0

    def took(self, samples: int) -> None:
        """Notes that every worker has used so many samples more."""
        self._used = min(self._size, self._used + samples * dist.get_world_size())

    @property
    def left(self) -> int:
        """Returns the number of samples that are left of the epoch for all workers."""
        return self._size - self._used

    def __iter__(self) -> Iterator[int]:
        rank, world = dist.get_rank(), dist.get_world_size()
        indices = self._order()[self._used :]
        indices += islice(cycle(indices), -len(indices) % world)
        return iter(indices[rank::world])

    def __len__(self) -> int:
        """Returns the number of samples that are left of the epoch for this worker."""
        return math.ceil(self.left / dist.get_world_size())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "used": self._used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self._used = state_dict["epoch"], state_dict["used"]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
        return torch.randperm(self._size, generator=generator, device="cpu").tolist()
