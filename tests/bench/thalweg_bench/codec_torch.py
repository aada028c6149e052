"""Runs torch's side of `thalweg bench codec`: its PowerSGD hook on one bucket."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thalweg.codecs import PowerSGD
from thalweg_bench.compression import TORCH_START
from thalweg_bench.rows import BenchError
from thalweg_bench.shapes import Shape, count_elements

_ended: list[object] = []


def end_process_group() -> None:
    """Ends torch's process group, whose threads run until this process ends.

    A comm hook's last future refers to the group, and is released by one of the group's threads. If
    that were the last reference, the thread would join itself, and the process abort.
    """
    _ended.append(dist.group.WORLD)
    dist.destroy_process_group()


class TorchRounds:
    """World size 1 over Gloo; the process must have no process group. One thread may use it."""

    def __init__(self, codec: PowerSGD, shapes: list[Shape], threads: int) -> None:
        torch.set_num_threads(threads)
        store = dist.HashStore()  # type: ignore[attr-defined] # torch.distributed has it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._model = DistributedDataParallel(
            _Gradients(shapes), bucket_cap_mb=giant_bucket_mb(shapes)
        )
        self._seconds: list[float] = []
        state = make_state(codec)
        # DDP reads a hook's annotations, and refuses those that are text.
        hook = lambda state, bucket: self._time(state, bucket)  # noqa: E731, PLW0108
        self._model.register_comm_hook(state, hook)
        for _ in range(TORCH_START):
            self.run()

    def run(self) -> float:
        """Returns the seconds from the hook's begin to the end of its future."""
        self._seconds.clear()
        self._model.zero_grad()
        self._model().backward()
        # torch's hook hangs over Gloo with more than one.
        if len(self._seconds) != 1:
            raise BenchError(f"DDP made {len(self._seconds)} buckets of the gradients, expected 1")
        return self._seconds[0]

    def close(self) -> None:
        end_process_group()

    def _time(self, state: powerSGD_hook.PowerSGDState, bucket: Any) -> Any:  # noqa: ANN401 - torch's
        begin = time.perf_counter()
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        self._seconds.append(time.perf_counter() - begin)
        return future


class _Gradients(nn.Module):
    """Its parameters' gradients are fixed random numbers."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self._gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        self._parameters_ = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        products = zip(self._parameters_, self._gradients, strict=True)
        return torch.stack([(p * g).sum() for p, g in products]).sum()


def make_state(codec: PowerSGD, epsilon: float = 0.0) -> powerSGD_hook.PowerSGDState:
    """Returns a state with `codec`'s settings, except for the start."""
    return powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=codec.rank,
        start_powerSGD_iter=TORCH_START,
        min_compression_rate=codec.min_compression_rate,
        use_error_feedback=codec.use_error_feedback,
        warm_start=codec.warm_start,
        orthogonalization_epsilon=epsilon,
        random_seed=codec.seed,
    )


def giant_bucket_mb(shapes: list[Shape]) -> int:
    """Returns the bucket_cap_mb with which DDP makes one bucket of them."""
    return math.ceil(4 * count_elements(shapes) / (1 << 20)) + 1
