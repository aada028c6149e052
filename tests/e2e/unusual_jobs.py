"""Contains training that is not built and stepped in the usual way: `unusual_jobs.py NAME OUT`
runs a function.

No function mentions Thalweg before its training is over.
"""

import copy
import io
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import job_runner
import torch
import torch.distributed as dist
from digests import digest
from plain_jobs import build, train
from torch.nn.parallel import DistributedDataParallel
from waiting import pass_time

WIDTH = 16
STEPS = 12


def seen(model: DistributedDataParallel, digest: str | None = None) -> dict[str, Any]:
    """Returns what Thalweg says of a module."""
    if "thalweg.ddp" not in sys.modules:
        return {"codec": None, "rounds": 0, "digest": digest}
    state = sys.modules["thalweg.ddp"].state_of(model)
    rounds = state.stats()["rounds"] if state else 0
    return {"codec": state and state.codec, "rounds": rounds, "digest": digest}


def loaded(model: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies() -> dict[str, Any]:
    """Trains modules that never went through DistributedDataParallel.__init__."""
    model = build()
    if dist.get_rank() == 0:
        average = copy.deepcopy(model)  # it is never trained
    result = {}
    for name, make in (("copied", copy.deepcopy), ("loaded", loaded)):
        made = make(model)
        result[name] = seen(made, train(made))
    train(model)
    made = copy.deepcopy(model)
    result["copied when trained"] = seen(made, train(made))
    if dist.get_rank() == 0:
        average.eval()(torch.zeros(1, 64))
    return result


def in_eval_mode() -> dict[str, Any]:
    """Trains a module in eval mode, then in training mode."""
    model = build().eval()
    train(model)
    first = seen(model)
    train(model.train())
    return {"eval": first, "train": seen(model)}


def no_batch() -> dict[str, Any]:
    """Rank 1 has nothing to train with; returns what the others are told."""
    model = build()
    with model.join():
        for _ in range(0 if dist.get_rank() == 1 else 2):
            try:
                model(torch.zeros(1, 64)).sum().backward()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def looks_at_shapes() -> dict[str, Any]:
    """Rank 0 runs its module in training mode before a barrier, and returns what it is told."""
    model = wrap(torch.nn.Linear(WIDTH, 1))
    try:
        if dist.get_rank() == 0:
            model(torch.ones(1, WIDTH))
        dist.barrier()
    except (RuntimeError, TimeoutError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def joins() -> list[dict[str, Any]]:
    """Returns the gradients of modules whose ranks leave join() one by one, in modes of DDP."""
    results = []
    for mode in ("initial world", "plain", "static graph", "views", "unused", "no_sync"):
        model = build_joined(mode)
        steps = leave(model, divide=mode == "initial world", twice=mode == "no_sync")
        results.append({"mode": mode, "steps": steps, **seen(model)})
    return results


def build_joined(mode: str) -> DistributedDataParallel:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return DistributedDataParallel(
        torch.nn.Sequential(*layers),
        bucket_cap_mb=0.001,  # two layers do not fit in a bucket
        static_graph=mode == "static graph",
        gradient_as_bucket_view=mode == "views",
        find_unused_parameters=mode == "unused",
    )


def leave(model: DistributedDataParallel, divide: bool, twice: bool) -> list[list[list[float]]]:
    """Rank r steps r + 2 times; returns each step's own gradient, and the average.

    `divide` is divide_by_initial_world_size; `twice`: each step accumulates two batches.
    """
    data = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(2, 4, WIDTH, generator=data) for _ in range(dist.get_rank() + 2)]
    steps = []
    with model.join(divide_by_initial_world_size=divide):
        for batch in batches:
            own = gradient(model.module, batch if twice else batch[1:])
            model.zero_grad()
            if twice:
                with model.no_sync():
                    loss(model(batch[0])).backward()
            loss(model(batch[1])).backward()
            steps.append([own, flat(model)])
    return steps


def adversaries() -> dict[str, Any]:
    """Trains as CycleGAN does: the generator's step freezes the discriminator it goes through."""
    torch.manual_seed(1)
    generator = wrap(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    discriminator = wrap(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    sides = (generator, discriminator)
    optimizers = [torch.optim.SGD(side.parameters(), lr=1e-5, momentum=0.9) for side in sides]
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        real, noise = torch.randn(2, 4, WIDTH, generator=data)
        discriminator.requires_grad_(False)
        optimizers[0].zero_grad()
        loss(discriminator(generator(noise)) - 1).backward()
        optimizers[0].step()
        discriminator.requires_grad_(True)
        optimizers[1].zero_grad()
        loss(discriminator(torch.cat([real - 1, generator(noise).detach()]))).backward()
        optimizers[1].step()
    return {name: seen(side, digest(side)) for name, side in zip(("G", "D"), sides, strict=True)}


def unfreezing() -> dict[str, Any]:
    """Trains the head first and the layers below it later, without wrapping the module anew."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = wrap(*layers, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        for depth, layer in enumerate(layers):
            layer.requires_grad_(depth + step // 4 >= 2)
        optimizer.zero_grad()
        loss(model(torch.randn(4, WIDTH, generator=data))).backward()
        optimizer.step()
    return seen(model, digest(model))


def compiled() -> dict[str, Any]:
    """Returns what the rules of the policy give to a module that is compiled before it is wrapped.

    The compiler is one that runs the module as it is.
    """
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(torch.compile(layers, backend="eager"))
    loss(model(torch.zeros(1, WIDTH))).backward()
    return seen(model) | {"left out": list(sys.modules["thalweg.ddp"].state_of(model)._left_out)}


def late() -> dict[str, Any]:
    """The rank LATE comes later to its first step and to its fourth than THALWEG_TIMEOUT."""
    model = build_joined("plain")
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        if dist.get_rank() == int(os.environ["LATE"]) and step in (0, 3):
            pass_time(1.25 * float(os.environ["THALWEG_TIMEOUT"]))
        loss(model(torch.randn(4, WIDTH, generator=data))).backward()
    return seen(model, digest(model))


def late_to_build() -> dict[str, Any]:
    """The rank LATE builds its module later than THALWEG_TIMEOUT, with the weights of all."""
    torch.manual_seed(0)
    if dist.get_rank() == int(os.environ["LATE"]):
        pass_time(2.5 * float(os.environ["THALWEG_TIMEOUT"]))
    model = wrap(torch.nn.Linear(WIDTH, 1), init_sync=False)
    loss(model(torch.ones(4, WIDTH))).backward()
    return seen(model, digest(model))


def stopped() -> dict[str, Any]:
    """Trains until a step fails; rank STOPPED stops in its fourth one.

    Returns what a worker is told, and the seconds since its last step.
    """
    model = build_joined("plain")
    going = Path(os.environ["TMPDIR"], f"going{dist.get_rank()}")
    for step in itertools.count():
        if step == 3:
            going.touch()
            if str(dist.get_rank()) == os.environ["STOPPED"]:
                os.kill(os.getpid(), signal.SIGSTOP)
        begin = time.monotonic()
        try:
            loss(model(torch.ones(4, WIDTH))).backward()
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - begin}
    return {}


def wrap(*layers: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Sequential(*layers), **options)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() * 1000


def gradient(model: torch.nn.Module, batches: torch.Tensor) -> list[float]:
    """Returns the gradient of this rank alone."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for batch in batches:
        loss(alone(batch)).backward()
    return flat(alone)


def flat(model: torch.nn.Module) -> list[float]:
    return [x for p in model.parameters() if p.grad is not None for x in p.grad.flatten().tolist()]


JOBS = {
    job.__name__: job
    for job in (
        adversaries,
        compiled,
        copies,
        in_eval_mode,
        joins,
        late,
        late_to_build,
        looks_at_shapes,
        no_batch,
        stopped,
        unfreezing,
    )
}


def main() -> None:
    job_runner.run(lambda name: JOBS[name]())


if __name__ == "__main__":
    main()
