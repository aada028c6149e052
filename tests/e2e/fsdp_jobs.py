"""Contains jobs that train sharded models on the back end "thalweg" and on Gloo:
`fsdp_jobs.py NAME OUT`.

STEPS is the number of steps. CASES chooses what is trained: names of functions of fsdp1_cases.py or
fsdp2_cases.py, separated by commas.
"""

import os
from datetime import datetime, timedelta
from typing import Any

import fsdp1_cases
import fsdp2_cases
import job_runner
import torch
import torch.distributed as dist
from fsdp_models import plain_loop
from job_runner import sent_bytes
from jobs import outcome
from torch.distributed.fsdp import MixedPrecisionPolicy

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


def missing() -> dict[str, Any]:
    """Loads a state that lacks a parameter; returns the error, and what bf16_ready() says."""
    model = fsdp2_cases.shard(fsdp1_cases.Groups.of("thalweg"))
    state = thalweg.fsdp.full_state_dict(model)
    state.pop("head.bias", None)
    error = outcome(lambda: thalweg.fsdp.load_full_state_dict(model, state))
    readiness = thalweg.fsdp.bf16_ready()
    return {"error": error, "bf16 is ready": bool(readiness), "remark": str(readiness)}


def carried() -> dict[str, list[float]]:
    """Trains with fully_shard(); returns how many bytes this node's sidecar sends to other nodes
    each step, and how many that should be, by strategy.
    """
    nodes = dist.get_world_size() // 2
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    result = {}
    for name, gathers, size, options in (
        ("full", 2, 4, {}),
        ("full in bf16", 2, 2, {"mp_policy": policy}),
        ("grad-op", 1, 4, {"reshard_after_forward": False}),
        ("hybrid", 0, 4, {"hybrid": True}),
    ):
        model = fsdp2_cases.shard(fsdp1_cases.Groups.of("thalweg"), 64, **options)
        in_blocks = sum(p.numel() for block in model.blocks for p in block.parameters())
        others = sum(p.numel() for p in model.parameters()) - in_blocks
        # The root's own parameters stay gathered from forward to backward.
        units = (gathers + 1) * in_blocks + 2 * others
        if name == "hybrid":  # an allreduce is a reduce_scatter and an allgather
            units = 2 * (in_blocks + others)
        plain_loop(model, lr=0.1, steps=1)
        before = sent_bytes()
        plain_loop(model, lr=0.1, steps=4)
        result[name] = [(sent_bytes() - before) / 4, size * units * (nodes - 1) / nodes]
    return result


JOBS = {job.__name__: job for job in (beside_gloo, moved, missing, carried)}


def main() -> None:
    job_runner.run(lambda name: JOBS[name](), "thalweg", timedelta(seconds=60))


if __name__ == "__main__":
    main()
