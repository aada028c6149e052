"""Contains a training of which nodes are lost: `lost_node_jobs.py train OUT`, and modules that
cannot lose any: `lost_node_jobs.py modules OUT`.

The training goes on until a node has been lost for some steps, and writes over how many workers
each step's gradient was the mean, what it was told of that before which step, which nodes were
lost, the longest step in seconds, and the weights at the end.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from harness import metric_in
from torch.nn.parallel import DistributedDataParallel
from waiting import settled, until

import thalweg.ddp

STEPS_AFTER = 200  # the first one that lacks a node
NAMED_WITHIN = 10  # seconds
SHARDS_WITHIN = 30  # seconds
BATCH, FEATURES, OUTPUTS, RATE = 8, 16, 4, 0.05


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, OUTPUTS)


def batches(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def draw(random: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, FEATURES, generator=random)


def await_names(state: thalweg.ddp.State) -> list[str]:
    """Returns the lost nodes, which shards name in their answers to heartbeats."""
    return settled(state.lost_nodes, bool, NAMED_WITHIN, every=0.01)


def await_shards() -> None:
    """Returns when all shards, at the HTTP addresses SHARDS, have given up the lost node. One that
    sums nothing does so by itself, and perhaps only after the training.
    """

    def have_lost(url: str) -> bool:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return metric_in(reply.read().decode(), "thalweg_shard_lost_nodes_total") > 0

    for http in os.environ["SHARDS"].split(","):
        url = f"http://{http}/metrics"
        until(f"a lost node at {http}", lambda url=url: have_lost(url), SHARDS_WITHIN)


def train() -> dict[str, object]:
    model = build()
    ddp = DistributedDataParallel(model)
    codec = os.environ.get("CODEC", "fp32")
    state = thalweg.ddp.attach(ddp, codec=codec, min_nodes=int(os.environ["NODES_LEFT"]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    random = batches(dist.get_rank())
    workers, longest, last = [], 0.0, time.monotonic()
    told = []
    state.on_loss(lambda left: told.append((left, len(workers))))
    # All that are left see the loss in the same step, because a step's gradient is one chunk.
    while sum(count < dist.get_world_size() for count in workers) < STEPS_AFTER:
        optimizer.zero_grad()
        ddp(draw(random)).square().mean().backward()
        optimizer.step()
        workers.append(int(state.stats()["workers"]))
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    lost = await_names(state)
    optimizer.step()  # before which the log names them
    await_shards()
    state.close()
    return {"workers": workers, "told": told, "lost": lost, "longest": longest, "weights": weights}


def modules() -> dict[str, object]:
    """Attaches modules that use the process group in each step, or do not. The environment asks for
    Thalweg.
    """
    unused = DistributedDataParallel(build(), find_unused_parameters=True)
    unused(torch.ones(BATCH, FEATURES)).square().mean().backward()
    taken = thalweg.ddp.state_of(unused) is not None
    try:
        thalweg.ddp.attach(unused)
    except ValueError as error:
        problem = str(error)
    static = DistributedDataParallel(build(), find_unused_parameters=True, static_graph=True)
    norms = [torch.nn.BatchNorm1d(FEATURES) for _ in range(2)]
    states = [
        thalweg.ddp.attach(module)
        for module in (
            static,
            DistributedDataParallel(norms[0]),
            DistributedDataParallel(norms[1], broadcast_buffers=False),
        )
    ]
    jobs = [state.job for state in states]
    dist.barrier()  # otherwise who leaves first is lost
    return {"taken": taken, "problem": problem, "jobs": jobs}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {"train": train, "modules": modules}[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    # The group has lost a process, so that it cannot be taken apart together.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
