"""Contains jobs that train sharded models on the back end "thalweg" and on Gloo:
`fsdp_jobs.py NAME OUT`.

STEPS is the number of steps. CASES chooses what is trained: names of functions of fsdp1_cases.py or
fsdp2_cases.py, separated by commas.
"""

import gc
import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import fsdp1_cases
import fsdp2_cases
import torch
import torch.distributed as dist
from fsdp_models import plain_loop
from jobs import outcome

import thalweg.fsdp

ALL = fsdp1_cases.CASES | fsdp2_cases.CASES


def beside_gloo() -> dict[str, Any]:
    """Trains each case on both; returns compare()'s outcomes, by case."""
    groups = fsdp1_cases.Groups.of("thalweg"), fsdp1_cases.Groups.of("gloo")
    steps = int(os.environ["STEPS"])
    names = os.environ["CASES"].split(",")
    return {name: ALL[name](groups, steps) for name in names}


def moved() -> dict[str, Any]:
    """Saves a model sharded by FSDP1, loads it into one sharded by FSDP2, and that one's into the
    first kind; each trains on before it is loaded again.
    """
    groups = fsdp1_cases.Groups.of("thalweg")
    path = thalweg.fsdp.checkpoint_path(os.environ["FOLDER"], "tiny", datetime(2026, 1, 2, 3), 4)
    models_of = fsdp1_cases.shard(groups.world), fsdp2_cases.shard(groups)
    states = []
    for source, target in (models_of, models_of[::-1]):
        plain_loop(source, lr=0.1, steps=1)
        states.append(thalweg.fsdp.full_state_dict(source))
        thalweg.fsdp.save(source, path, epoch=4)
        plain_loop(source, lr=0.1, steps=1)
        dist.barrier()  # rank 0 has written
        saved = torch.load(path)
        assert saved["epoch"] == 4
        thalweg.fsdp.load_full_state_dict(target, saved["model"] if dist.get_rank() == 0 else {})
        states += [saved["model"], thalweg.fsdp.full_state_dict(target)]
    if dist.get_rank() != 0:
        return {"empty": [not states[0], not states[2]]}
    same = [
        all(torch.equal(a[name], b[name]) for name in a) and list(a) == list(b)
        for a, b in (
            (states[0], states[1]),
            (states[1], states[2]),
            (states[3], states[4]),
            (states[4], states[5]),
        )
    ]
    fresh = any(not torch.equal(states[0][name], states[3][name]) for name in states[0])
    return {"same": same, "trained": fresh, "files": [file.name for file in path.parent.iterdir()]}


def missing() -> str:
    """Loads a state that lacks a parameter; returns the error."""
    model = fsdp2_cases.shard(fsdp1_cases.Groups.of("thalweg"))
    state = thalweg.fsdp.full_state_dict(model)
    state.pop("head.bias", None)
    return outcome(lambda: thalweg.fsdp.load_full_state_dict(model, state))


def ready() -> list[Any]:
    readiness = thalweg.fsdp.bf16_ready()
    return [bool(readiness), str(readiness)]


JOBS = {job.__name__: job for job in (beside_gloo, moved, missing, ready)}


def main() -> None:
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("thalweg", timeout=timedelta(seconds=60))
    result = JOBS[name]()
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
