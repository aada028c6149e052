"""Contains jobs on the back end "thalweg": `process_group_jobs.py NAME OUT`.

SEED chooses what `random_collectives` does, PATIENCE the process group's timeout in seconds.
"""

import hashlib
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from callback_jobs import late_callbacks, powersgd_of_torch
from jobs import outcome
from random_collectives import random_collectives, random_large_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.cli._look import look_at_sidecar


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
        while len(seen) < 2:  # until the sidecar has heard of it
            answer = look_at_sidecar(os.environ["HTTP"])
            assert not answer.error, answer.error
            [job] = answer.jobs
            seen = job["collectives"]
        store.set("seen", "")
        work.wait()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(1000))
    return seen


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
    ]
    dist.all_reduce(ones)
    return [*errors, f"{ones[0].item():g}"]


def mismatched() -> str:
    """Rank 1 reduces another shape; returns the error."""
    tensor = torch.ones(3 + (dist.get_rank() == 1))
    return outcome(lambda: dist.all_reduce(tensor))


def deserted() -> str:
    """Rank 1 does not come to the second collective; returns the error of the others."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["deserted"], timedelta(seconds=60))
        return ""
    error = outcome(lambda: dist.all_reduce(torch.ones(3)))
    store.set("deserted", "1")
    return error


def group_of_one_rank() -> str:
    """Rank 1 does not come to the making of a group; returns the error of the others."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["alone"])
        return ""
    patience = timedelta(seconds=4)
    error = outcome(lambda: dist.new_group(backend="thalweg", timeout=patience))
    store.set("alone", "1")
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
        powersgd_of_torch,
        many_collectives,
        refused,
        mismatched,
        deserted,
        group_of_one_rank,
    )
}


def main() -> None:
    patience = timedelta(seconds=float(os.environ.get("PATIENCE", "60")))
    backend = "gloo" if sys.argv[1] == "group_of_one_rank" else "thalweg"
    job_runner.run(lambda name: JOBS[name](), backend, patience)


if __name__ == "__main__":
    main()
