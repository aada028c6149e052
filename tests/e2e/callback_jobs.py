"""Contains jobs whose callbacks call collectives."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def late_callbacks() -> list[float]:
    """Adds callbacks before a collective ends on odd ranks, afterwards on even ones.

    All collectives have one size: those of the callbacks would be taken for those that the main
    thread begins meanwhile, if their order decided.
    """
    rank = dist.get_rank()
    sums = []
    for step in range(20):
        first = dist.all_reduce(torch.full((4,), 1.0), async_op=True)
        if rank % 2 == 0:
            first.wait()
        in_callback = first.get_future().then(lambda _, step=step: _sum(100.0 * (step + 1)))
        sums += [_sum(10.0), in_callback.wait()]
    return sums


def late_exchanges() -> list[list[float]]:
    """Does it with all_to_all."""
    got = []
    for step in range(10):
        first = dist.all_reduce(torch.full((4,), 1.0), async_op=True)
        if dist.get_rank() % 2 == 0:
            first.wait()
        value = 100.0 * (step + 1)
        in_callback = first.get_future().then(lambda _, value=value: _exchanged(value))
        got += [_exchanged(10.0), in_callback.wait()]
    return got


def waiting_callbacks() -> list[float]:
    """Waits in a collective's callback for the next one, which the main thread has begun too.

    Rank 0 begins the second one late, so that the others' callbacks have to wait for it.
    """
    store = dist.distributed_c10d._get_default_store()
    sums = []
    for step in range(3):
        first, second = torch.ones(4), torch.full((4,), 2.0)
        works = [dist.all_reduce(first, async_op=True)]
        if dist.get_rank() == 0:
            store.wait([f"rank 1 waits in step {step}"])
        works.append(dist.all_reduce(second, async_op=True))

        def use(_: object, second: object = works[1], step: int = step) -> None:
            store.set(f"rank {dist.get_rank()} waits in step {step}", "")
            second.wait()

        works[0].get_future().then(use).wait()
        sums += [float(first[0]), float(second[0])]
    return sums


def overtaken_callback() -> list[float]:
    """Returns what callbacks sum, of which rank 0's first returns late: the second has begun.

    The others begin when rank 0 has added its callbacks, which it would run itself otherwise.
    """
    store = dist.distributed_c10d._get_default_store()
    second_begun = threading.Event()
    sums: dict[int, float] = {}

    def use(number: int) -> None:
        if number == 2:
            second_begun.set()
        elif dist.get_rank() == 0:
            second_begun.wait()
        sums[number] = _sum(float(number))

    if dist.get_rank() > 0:
        store.wait(["added"])
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    futures = [
        work.get_future().then(lambda _, number=number: use(number))
        for number, work in enumerate(works, 1)
    ]
    store.set("added", "")
    for future in futures:
        future.wait()
    return [sums[1], sums[2]]


def callbacks_of_gloo() -> list[float]:
    """Adds callbacks to Gloo's futures, before these are complete and after, by odd and even."""
    gloo = dist.new_group(backend="gloo")
    sums = []
    for step in range(5):
        theirs = dist.all_reduce(torch.ones(4), group=gloo, async_op=True)
        if dist.get_rank() % 2 == 0:
            theirs.wait()
        in_callback = theirs.get_future().then(lambda _, step=step: _sum(100.0 * (step + 1)))
        sums += [_sum(10.0), in_callback.wait()]
    return sums


def _sum(value: float) -> float:
    work = dist.all_reduce(tensor := torch.full((4,), value), async_op=True)
    work.get_future().wait()
    return float(tensor[0])


def _exchanged(value: float) -> list[float]:
    ranks = dist.get_world_size()
    got, given = torch.empty(ranks), torch.full((ranks,), value + dist.get_rank())
    dist.all_to_all_single(got, given, async_op=True).get_future().wait()
    return got.tolist()


def powersgd_of_torch() -> dict[str, Any]:
    """Trains with torch's hook in many buckets and in one; returns how far apart they end.

    With one sample a rank, the mean gradient of a weight has as much rank as there are workers: the
    hook gives it exactly, whatever it draws for a bucket to begin with.
    """
    many, one, before = _train(0.02), _train(100), _train(100, steps=0)
    return {
        "difference": float((many - one).abs().max()),
        "change": float((one - before).abs().max()),
    }


def _train(bucket_mb: float, steps: int = 8) -> torch.Tensor:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).double()
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket_mb)
    state = PowerSGDState(
        None, dist.get_world_size(), start_powerSGD_iter=3, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(1, 64, generator=data, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
