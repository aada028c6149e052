"""Contains training that is not built and stepped in the usual way: `unusual_jobs.py NAME OUT`
runs a function.

No function mentions Thalweg before its training is over.
"""

import copy
import gc
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_jobs import build, train
from torch.nn.parallel import DistributedDataParallel


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


JOBS: list[Callable[[], Any]] = [copies, in_eval_mode, no_batch]


def main() -> None:
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = next(job for job in JOBS if job.__name__ == name)()
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    gc.collect()  # see jobs.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
