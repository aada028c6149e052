"""Is a job of parts of the Swin example: `swin_jobs.py NAME OUT`. NAME is `by_hand`, which reduces
gradients by hand, or `sharded`, which takes a step of a sharded layer.
"""

from __future__ import annotations

import sys
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import thalweg
from thalweg.examples.swin import precision
from thalweg.examples.swin.config import Config


def scales(rank):
    """Returns what all_reduce() makes of small whole numbers, whose sums are exact."""
    shapes = [((3, 4), torch.float32), ((5,), torch.float16), ((), torch.float32)]
    result = {}
    for name, scale in {"mean": None, "sum": 1.0, "tenth": 0.1}.items():
        grads = [torch.full(shape, rank + 1 + i, dtype=t) for i, (shape, t) in enumerate(shapes)]
        with torch.no_grad():
            thalweg.all_reduce(grads, scale)
        result[name] = [sorted({round(x, 3) for x in g.flatten().tolist()}) for g in grads]
    return result


def overflows():
    """Returns what is counted of an infinity, and then of sums that float16 cannot hold, too."""
    counted = []
    for scale in (None, 1.0):
        grads = [torch.tensor([1.0, 40000.0, float("inf"), -50000.0]).half(), torch.ones(2)]
        with torch.no_grad():
            state = thalweg.all_reduce(grads, scale)
        counted.append(state.stats()["nonfinite_elems"])
    return counted


def trainings(rank, world):
    """Returns the weights of a training reduced by hand, and by DDP over Gloo, bit by bit."""
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    by_ddp = torch.nn.parallel.DistributedDataParallel(layers[1])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.25, momentum=0.5) for layer in layers]
    torch.manual_seed(10 + rank)
    for _ in range(3):
        inputs = torch.randn(4, 8)
        for model, optimizer in zip((layers[0], by_ddp), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            if model is not by_ddp:
                state = thalweg.all_reduce(thalweg.fetch_gradients(optimizer), 1 / world)
            optimizer.step()
    weights = [torch.cat([p.flatten() for p in layer.parameters()]).tolist() for layer in layers]
    return {"weights": weights, "rounds": state.stats()["rounds"]}


def differing(rank):
    """Returns the errors of workers whose gradients differ, by what differs.

    All but the first call follow one with what one of the workers has, which has begun a job.
    """
    alike = [torch.ones(3), torch.ones(5)]
    thalweg.all_reduce(alike)
    thalweg.all_reduce(alike[:1])
    of_ranks = {
        "first call": [[torch.ones(2)], [torch.ones(4)]],
        "shape": [alike, [torch.ones(3), torch.ones(6)]],
        "type": [alike, [torch.ones(3), torch.ones(5).half()]],
        "number": [alike[:1], alike],
        "nothing": [[], alike],
        "sparse": [alike, [torch.ones(3), torch.ones(5).to_sparse()]],
        "unused": [fetched(used) for used in (0, 1)],
    }
    errors = {what: outcome(thalweg.all_reduce, given[rank]) for what, given in of_ranks.items()}
    errors["codec"] = outcome(thalweg.all_reduce, alike, codec=("int8" if rank else None))
    return errors | {"afterwards": outcome(thalweg.all_reduce, alike)}


def fetched(used):
    """Returns the gradients of two layers of the same size, of which one is used."""
    layers = [torch.nn.Linear(3, 1, bias=False) for _ in range(2)]
    layers[used](torch.ones(3)).sum().backward()
    return thalweg.fetch_gradients(torch.optim.SGD([layer.weight for layer in layers], lr=1))


def outcome(function, *arguments, **options):
    """Returns the error, or else "none"."""
    try:
        function(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def infinity_of_one_shard(rank):
    """Returns what a step of O1 does after an infinite gradient of a row that rank 0 has."""
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = Config(BACKEND="fsdp", AMP_OPT_LEVEL="O1")
    level = precision.prepare(model, optimizer, config, torch.device("cpu"))
    before = model.weight.to_local().clone()
    factors = torch.ones(4)
    factors[0] = float("inf") if rank == 0 else 1.0
    level.backward((model(torch.ones(4)) * factors).sum(), final=True)
    finite = bool(model.weight.grad.to_local().isfinite().all())
    norm = level.step(1.0)
    kept = torch.equal(before, model.weight.to_local())
    return {"finite": finite, "norm": str(float(norm)), "scale": level.loss_scale(), "kept": kept}


def by_hand() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "scales": scales(rank),
        "overflows": overflows(),
        **trainings(rank, world),
        "differing": differing(rank),
    }


def main() -> None:
    if sys.argv[1] == "sharded":
        job_runner.run(lambda _: infinity_of_one_shard(dist.get_rank()), "thalweg")
    else:
        job_runner.run(lambda _: by_hand())


if __name__ == "__main__":
    main()
