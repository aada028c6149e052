"""Contains jobs that attach modules to groups of the back end "thalweg":
`attached_group_jobs.py NAME OUT`.

All gradients are integers of at most 400, and their means over two or four workers have at most two
more binary digits: float16 has them all, so whoever sums them, in whatever order, gets the same
bits. SIDECAR_HTTP is the address of the HTTP port of this worker's sidecar.
"""

import contextlib
import gc
import json
import os
import sys
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from harness import metric_in
from jobs import outcome
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp


def trained_like_gloo() -> dict[str, Any]:
    """Trains a module that ATTACH says who attaches, destroys the group, and trains it on Gloo."""
    model = build()
    if os.environ["ATTACH"] == "script":
        thalweg.ddp.attach(model)
    ours = train(model)
    state = thalweg.ddp.state_of(model)
    assert state is not None
    jobs, stats = running_jobs(), state.stats()
    store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    after = state.status(), outcome(lambda: train(model))
    state.close()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    codec = os.environ.pop("THALWEG_CODEC", "fp32")
    model = build()
    if codec.startswith("powersgd"):
        thalweg.ddp.attach(model, codec)
    return {
        "ours": ours,
        "theirs": train(model),
        "untrained": digest(build()),
        "jobs": jobs,
        "rounds": stats["rounds"],
        "compression": stats["compression"],
        "after": after,
    }


def other_settings() -> dict[str, Any]:
    """Attaches with what the group's session was not started with, and a second module."""
    first, second, third = (build() for _ in range(3))
    compressed = thalweg.ddp.attach(first, "bf16")
    shared = thalweg.ddp.attach(second)
    alone = thalweg.ddp.attach(third)
    result: dict[str, Any] = {
        "jobs": running_jobs(),
        "names": len({state.job for state in (compressed, shared, alone)}),
        "trained": len({train(model) for model in (second, third)}),
    }
    shared.close()
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return result | {"sum": ones.tolist(), "closed": [shared.closed, train(second)]}


def groups_beside_gloo() -> dict[str, Any]:
    """Makes groups whose default group is Gloo's, and attaches a module to one of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = dist.new_group(backend="thalweg")
    last = dist.new_group([world - 1, world - 2], backend="thalweg")
    given = torch.tensor([rank, 10.0])
    sums = given.clone(), given.clone()
    dist.all_reduce(sums[0], group=everybody)
    if rank >= world - 2:
        dist.all_reduce(sums[1], group=last)
        dist.broadcast(given, src=world - 1, group=last)
    state = thalweg.ddp.attach(model := build(group=everybody))
    result = {
        "sums": [total.tolist() for total in sums],
        "broadcast": given.tolist(),
        "jobs": running_jobs(),
        "ours": train(model),
        "theirs": train(build()),
    }
    dist.destroy_process_group(everybody)
    return result | {"after": state.status(), "left behind": destroyed_groups()}


def destroyed_groups() -> int:
    """Makes and destroys some groups; returns how many more sockets are open then."""
    before = open_sockets()
    for _ in range(3):
        group = dist.new_group(backend="thalweg")
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    del group
    gc.collect()
    return open_sockets() - before


def open_sockets() -> int:
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor
            links.append(str(file.readlink()))
    return sum(link.startswith("socket:") for link in links)


def attached() -> float:
    """Trains; returns how many jobs there are."""
    thalweg.ddp.attach(model := build())
    train(model)
    return running_jobs()


def never_destroyed() -> str:
    """Trains, and leaves the group to the end of the process."""
    state = thalweg.ddp.attach(model := build())
    train(model)
    return state.job


def build(group: Any = None) -> DistributedDataParallel:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 50, bias=False), nn.Linear(50, 40, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return DistributedDataParallel(model, bucket_cap_mb=0.005, process_group=group)


def train(model: DistributedDataParallel) -> str:
    """Takes three steps with gradients of -400 to 400; returns a digest of the parameters."""
    data = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(3):
        batch = torch.randint(-1, 2, (8, 40), generator=data).float()
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(batch)
        loss.backward(torch.randint(-1, 2, loss.shape, generator=data).float())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad.sign())
                parameter.clamp_(-1, 1)
    return digest(model)


def running_jobs() -> float:
    """Returns how many jobs have workers on this node."""
    url = f"http://{os.environ['SIDECAR_HTTP']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        return metric_in(reply.read().decode(), "thalweg_sidecar_jobs")


JOBS = {
    job.__name__: job
    for job in (
        trained_like_gloo,
        other_settings,
        groups_beside_gloo,
        attached,
        never_destroyed,
    )
}


def main() -> None:
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    backend = "gloo" if name == "groups_beside_gloo" else "thalweg"
    dist.init_process_group(backend, timeout=timedelta(minutes=4))  # which is not torch's default
    result = JOBS[name]()
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    gc.collect()
    if name != "never_destroyed":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
