"""Contains ordinary training with DistributedDataParallel: `plain_jobs.py NAME OUT` runs a
function.

Only `who_wins` mentions Thalweg. UNAWARE_RANK has none of the variables that activate it.
"""

import os
import sys
from typing import Any

if os.environ["RANK"] == os.environ.get("UNAWARE_RANK"):
    for variable in [name for name in os.environ if name.startswith("AIAK_")]:
        del os.environ[variable]

import digests
import job_runner
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def train(model: DistributedDataParallel) -> str:
    """Returns a digest of the parameters afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
    return digests.digest(model)


def build() -> DistributedDataParallel:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(64, 5000), nn.Tanh(), nn.Linear(5000, 10))
    return DistributedDataParallel(layers, bucket_cap_mb=1)  # torch.compile makes no smaller ones


def plain() -> dict[str, Any]:
    digest = train(build())
    return {
        "digest": digest,
        "modules": [name for name in sys.modules if name.startswith("thalweg")],
    }


def sparse() -> dict[str, Any]:
    """Trains with gradients that only torch can average."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([dist.get_rank()])).sum().backward()
    return {"grad": model.module.weight.grad.to_dense().tolist()}


def caught() -> dict[str, Any]:
    """Returns what a script sees that continues after an error."""
    try:
        train(build())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def who_wins() -> dict[str, Any]:
    """Returns the codec of modules that were treated differently before training; null: none."""
    import thalweg.ddp

    result = {}
    for treatment in (registers, registers_builtin, registers_late, attaches, evaluates, compiles):
        model = build()
        compiled = treatment(model)
        digest = train(model if compiled is None else compiled)
        state = thalweg.ddp.state_of(model)
        result[treatment.__name__] = {"codec": state and state.codec, "digest": digest}
        result[treatment.__name__]["rounds"] = state.stats()["rounds"] if state else 0
    return result


def registers(model: DistributedDataParallel) -> None:
    model.register_comm_hook(dist.group.WORLD, mean)


def mean(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def registers_builtin(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def registers_late(model: DistributedDataParallel) -> None:
    """Registers its hook after an evaluation."""
    evaluates(model)
    registers(model)


def attaches(model: DistributedDataParallel) -> None:
    import thalweg.ddp

    thalweg.ddp.attach(model, thalweg.BF16())


def evaluates(model: DistributedDataParallel) -> None:
    """Evaluates on rank 0 only, in all ways that are not training."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.zeros(1, 64))
        model.eval()(torch.zeros(1, 64))
        model.train()


def compiles(model: DistributedDataParallel) -> nn.Module:
    return torch.compile(model, backend="eager")


JOBS = {job.__name__: job for job in (plain, sparse, caught, who_wins)}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
