"""Contains jobs on the back end "thalweg": `process_group_jobs.py NAME OUT`.

SEED chooses what `random_collectives` does, PATIENCE how many seconds a call may take that fails.
"""

import hashlib
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import job_runner
import torch
import torch.distributed as dist
from callback_jobs import (
    callbacks_of_gloo,
    late_callbacks,
    late_exchanges,
    overtaken_callback,
    powersgd_of_torch,
    waiting_callbacks,
)
from jobs import outcome
from random_collectives import random_collectives, random_large_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import until

from thalweg.cli._look import look_at_sidecar

Options = TypeVar("Options", dist.AllreduceOptions, dist.ReduceOptions)


def trained_with_ddp() -> dict[str, Any]:
    """Trains with the back end alone, and with Gloo; returns digests and the largest difference."""
    ours, theirs = (_train(group) for group in (dist.group.WORLD, dist.new_group(backend="gloo")))
    return {
        "digest": hashlib.sha256(ours.numpy().tobytes()).hexdigest(),
        "difference": float((ours - theirs).abs().max()),
        "change": float((ours - _train(dist.group.WORLD, steps=0)).abs().max()),
    }


def seen_from_outside() -> list[Any]:
    """Returns what the sidecar at HTTP says of a collective that is done and one that rank 1 has
    not come to.
    """
    dist.all_reduce(torch.ones(4))
    store = dist.distributed_c10d._get_default_store()
    seen: list[Any] = []
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)

        def both() -> list[Any]:
            answer = look_at_sidecar(os.environ["HTTP"])
            assert not answer.error, answer.error
            [job] = answer.jobs
            return job["collectives"] if len(job["collectives"]) == 2 else []

        seen = until("the second one at the sidecar", both, 20, every=0.01)
        store.set("seen", "")
        work.wait()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(1000))
    return seen


def gradients_through_views() -> list[float]:
    """Reduces a view that is not contiguous and requires a gradient, and a channels-last weight."""
    leaf = torch.ones(3, 2, requires_grad=True)
    view = (leaf * 2).t()
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with torch.no_grad():
        dist.all_reduce(view)
        dist.broadcast(convolution.weight, 0)
    view.sum().backward()
    assert leaf.grad is not None
    return [*leaf.grad.flatten().tolist(), float(convolution.weight.sum())]


def many_in_flight() -> float:
    """Begins 3000 collectives and as many messages before it waits for the first one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.ones(3) for _ in range(3000)]
    got = [torch.zeros(3) for _ in tensors]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works += [dist.irecv(tensor, (rank - 1) % size) for tensor in got]
    works += [dist.isend(torch.ones(3), (rank + 1) % size) for _ in tensors]
    for work in works:
        work.wait()
    summed, received = (float(torch.stack(each).sum()) for each in (tensors, got))
    return summed / size + received


def groups_of_a_store_that_stays() -> list[float]:
    """Makes the default group and a part of it again and again, over a store that remembers, as
    torchrun's does. The part's first rank comes last.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = []
    for cycle in range(3):
        dist.destroy_process_group()
        kept = dist.PrefixStore("kept", store)
        dist.init_process_group("thalweg", store=kept, rank=rank, world_size=size)
        if rank == 0:
            store.wait([f"{other} makes a part in {cycle}" for other in range(1, size)])
        store.set(f"{rank} makes a part in {cycle}", "")
        part = dist.new_group(list(range(size)))
        dist.all_reduce(tensor := torch.ones(1), group=part)
        sums.append(float(tensor))
    return sums


def _train(group: Any, steps: int = 4) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())  # DDP broadcasts rank 0's parameters
    layers = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 10))
    model = DistributedDataParallel(layers, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def groups_from_threads() -> list[float]:
    """Uses two groups from two threads, in opposite orders on odd and even ranks."""
    groups = [dist.new_group() for _ in range(2)]
    sums = [torch.zeros(5000) for _ in groups]

    def use(which: int) -> None:
        for _ in range(30):
            tensor = torch.full((5000,), float(which + 1))
            dist.all_reduce(tensor, group=groups[which])
            sums[which] += tensor

    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    threads = [threading.Thread(target=use, args=(which,)) for which in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(total.min()) for total in sums] + [float(total.max()) for total in sums]


def many_collectives() -> dict[str, Any]:
    """Takes part in COUNT random collectives, in two halves. Returns what was wrong, and what this
    rank and the programs PIDS used after each half.
    """
    pids = [os.getpid(), *map(int, os.environ["PIDS"].split(","))]
    problems, used = [], []
    for _ in range(2):
        problems += random_collectives(int(os.environ["COUNT"]) // 2)
        dist.barrier()
        used.append({str(pid): _used(pid) for pid in pids})
        dist.barrier()
    return {"problems": problems, "used": used}


def _used(pid: int) -> dict[str, int]:
    """Returns how much a process has now."""
    folder = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "kilobytes": int(status["VmRSS"].split()[0]),
    }


def refused() -> list[str]:
    """Asks for what cannot be; returns the errors. The job goes on."""
    ones, integers = torch.ones(3), torch.ones(3, dtype=torch.int32)
    errors = [
        outcome(lambda: dist.all_reduce(ones, dist.ReduceOp.BXOR)),
        outcome(lambda: dist.all_reduce(integers, dist.ReduceOp.AVG)),
        outcome(lambda: dist.all_gather_into_tensor(torch.ones(4), ones)),
        outcome(lambda: dist.group.WORLD.allgather_into_tensor_coalesced([], [ones])),
    ]
    dist.all_reduce(ones)
    return [*errors, f"{ones[0].item():g}"]


def mismatched() -> str:
    """Rank 1 reduces another shape; returns the error."""
    dist.barrier()
    tensor = torch.ones(3 + (dist.get_rank() == 1))
    return outcome(lambda: dist.all_reduce(tensor))


def of_another_root() -> str:
    """Rank 2 calls an operation with rank 1 as root, others with rank 0; returns the error."""
    # A rank that still makes its group when others fail has the error from `init_process_group`.
    dist.barrier()
    root = int(dist.get_rank() == 2)
    world, is_root = dist.get_world_size(), dist.get_rank() == root
    tensor, all_ranks = torch.ones(3), [torch.ones(3) for _ in range(world)]
    calls = {
        "broadcast": lambda: dist.broadcast(tensor, root),
        "reduce": lambda: dist.reduce(tensor, root),
        "gather": lambda: dist.gather(tensor, all_ranks if is_root else None, root),
        "scatter": lambda: dist.scatter(tensor, all_ranks if is_root else None, root),
    }
    return outcome(calls[os.environ["CALL"]])


def _patient(options: Options) -> Options:
    """Limits one call alone: what all ranks take part in before it may take longer."""
    options.timeout = timedelta(seconds=float(os.environ["PATIENCE"]))
    return options


def of_another_kind() -> str:
    """Rank 2 calls another operation than the others; returns the error."""
    dist.barrier()
    tensors, group = [torch.ones(3)], dist.group.WORLD
    if dist.get_rank() == 2:
        return outcome(lambda: group.reduce(tensors, _patient(dist.ReduceOptions())).wait())
    return outcome(lambda: group.allreduce(tensors, _patient(dist.AllreduceOptions())).wait())


def negated() -> list[float]:
    """Gathers into views whose memory holds negatives, as that of a conjugate's imaginary part, and
    sums such ones.
    """
    ranks = range(dist.get_world_size())
    parts = [torch.zeros(1)._neg_view() for _ in ranks]
    dist.all_gather(parts, torch.tensor([1.0 + dist.get_rank()]))
    given = [torch.tensor([1.0 + rank])._neg_view() for rank in ranks]
    total = torch.zeros(1)
    dist.reduce_scatter(total, given)
    return [part.item() for part in (*parts, total)]


def deserted() -> str:
    """Rank 1 does not come to the second collective; returns the error of the others."""
    dist.barrier()
    if dist.get_rank() == 1:
        job_runner.meet()  # which is when the others have their errors
        return ""
    options = _patient(dist.AllreduceOptions())
    error = outcome(lambda: dist.group.WORLD.allreduce([torch.ones(3)], options).wait())
    job_runner.meet()
    return error


def group_of_one_rank() -> str:
    """Rank 1 does not come to the making of a group; returns the error of the others."""
    if dist.get_rank() == 1:
        job_runner.meet()
        return ""
    patience = timedelta(seconds=4)
    error = outcome(lambda: dist.new_group(backend="thalweg", timeout=patience))
    job_runner.meet()
    return error


JOBS = {
    job.__name__: job
    for job in (
        random_collectives,
        random_large_collectives,
        trained_with_ddp,
        seen_from_outside,
        groups_from_threads,
        late_callbacks,
        late_exchanges,
        waiting_callbacks,
        overtaken_callback,
        callbacks_of_gloo,
        powersgd_of_torch,
        gradients_through_views,
        many_in_flight,
        groups_of_a_store_that_stays,
        many_collectives,
        refused,
        mismatched,
        of_another_root,
        of_another_kind,
        negated,
        deserted,
        group_of_one_rank,
    )
}


def main() -> None:
    backend = "gloo" if sys.argv[1] == "group_of_one_rank" else "thalweg"
    job_runner.run(lambda name: JOBS[name](), backend, timedelta(seconds=60))


if __name__ == "__main__":
    main()
