"""Contains jobs that sum gradients over copies of shards in a codec:
`compressed_copies_jobs.py NAME OUT`.

Workers form a mesh of pairs, each of which has all shards. FOLDER is where checkpoints lie.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsdp2_cases
import fsdp_models as models
import job_runner
import torch
import torch.distributed as dist
from compressed_copies_sums import recovered, whole_numbers
from compressed_fsdp_cases import (
    WIDTH,
    Remarks,
    by_environment,
    gathered,
    parts,
    restore,
    steps,
    swapped,
)
from digests import digest
from fsdp1_cases import Groups
from held_back import held_back
from job_runner import sent_bytes
from jobs import outcome
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from thalweg._sharded._units import units_of
from thalweg.fsdp import compress, state_of

POWERSGD = "powersgd:rank=4,start=0"
LOSSY = (POWERSGD, "int8:start=0", "onebit:start=0", "topk:ratio=0.1,start=0")
ALL = ("fp16", "bf16", *LOSSY, "auto:rank=4,start=0")
STEPS = 10


def paired(groups: Groups, width: int = WIDTH, **options: Any) -> nn.Module:
    return fsdp2_cases.shard(groups, width, hybrid=True, **options)


def trained() -> dict[str, Any]:
    """Trains with each codec; returns, by codec, losses, those without any change of a weight, a
    digest of what a rank computes with, how many bytes of values this node sent in a step, and what
    was said.
    """
    result, untrained = {}, models.plain_loop(models.build(WIDTH), lr=0.0, steps=4)
    for codec in ("", *ALL):
        model, remarks = paired(Groups.of("thalweg")), Remarks()
        state = compress(model, codec) if codec else None
        before = sent_bytes()
        losses = models.plain_loop(model, lr=0.1, steps=4)
        result[codec] = {
            "losses": losses,
            "untrained": untrained,
            "sent": (sent_bytes() - before) / 4,
            "digest": digest(gathered(model)),
            "said": remarks.stop(),
            "found": state_of(model) is state,
            "in": [] if state is None else [one.codec for one in state.copies],
            "rounds": 0 if state is None else state.copies[0].stats()["rounds"],
        }
        if state is not None:
            state.close()
    return result


def delivered() -> dict[str, float]:
    """Returns, by codec, how far the sum of what arrived in some steps and is held back is from
    that of the true gradients, at most, in units of what rounding allows.

    Each step rounds at most eight times for each copy, as residual_jobs.py says, and twice more to
    convert, by 2^-24 of the largest number that occurred.
    """
    batch, exact = next(models.batches()), paired(Groups.of("thalweg"))
    models.loss_of(exact, batch).backward()
    true = {name: models.local(p.grad).double() for name, p in exact.named_parameters()}
    return {codec: _missing(codec, batch, true) for codec in LOSSY}


def _missing(codec: str, batch: torch.Tensor, true: dict[str, torch.Tensor]) -> float:
    groups = Groups.of("thalweg")
    model = paired(groups)
    state = compress(model, codec)
    sums = {name: torch.zeros_like(value) for name, value in true.items()}
    largest = max(float(value.abs().max()) for value in true.values())
    for _ in range(STEPS):
        model.zero_grad()
        models.loss_of(model, batch).backward()
        for name, parameter in model.named_parameters():
            arrived = models.local(parameter.grad)
            sums[name] += arrived.double()
            largest = max(largest, float(arrived.abs().max()))
    copies, missing = groups.across.size(), {}
    for name, pair in held_back(state.copies[0]).items():
        on_nodes, on_shards = (values.view_as(true[name]) for values in pair)
        largest = max(largest, float(on_nodes.abs().max()), float(on_shards.abs().max()))
        dist.all_reduce(on_nodes, group=groups.across)
        dist.all_reduce(on_shards, group=groups.across)  # only one node knows them
        left = STEPS * true[name] - sums[name] - on_nodes / copies - on_shards
        missing[name] = float(left.abs().max())
    assert len(missing) >= 6, f"only {list(missing)} are compressed"
    state.close()
    return max(missing.values()) / (STEPS * 10 * copies * 2.0**-24 * 2 * largest)


def resumed() -> dict[str, Any]:
    """Trains six steps; and three, saves, and three more in a fresh model, with each codec. Returns
    digests of this rank's shards, and what is said of states that lack something.
    """
    result: dict[str, Any] = {}
    for codec in ("powersgd:rank=2,start=1", "int8:start=1"):
        made = [_begin(codec) for _ in range(2)]
        source = models.batches()
        model, optimizer, state = made[0]
        steps(model, optimizer, source, 3)
        folder = Path(os.environ["FOLDER"]) / codec.partition(":")[0]
        checkpoint.save(parts(model, optimizer, state), checkpoint_id=folder)
        steps(model, optimizer, source, 3)
        source = models.batches()
        for _ in range(3):
            next(source)
        restore(*made[1], folder)
        steps(*made[1][:2], source, 3)
        digests = [digest([models.local(p) for p in one[0].parameters()]) for one in made]
        saved, remarks = made[1][2].state_dict(), Remarks()
        other = _begin("onebit:start=1")[2]
        error = outcome(lambda s=saved, o=other: o.load_state_dict(s | {"codec": o.codec}))
        fresh = _begin(codec)[2]
        fresh.load_state_dict({k: v for k, v in saved.items() if not k.startswith("copies")})
        result[codec] = {"digests": digests, "error": error, "said": remarks.stop()}
    return result


def resumed_by_one() -> dict[str, Any]:
    """Trains three steps, and two in a fresh model, with rank 0's state on all ranks; returns a
    digest of what a rank computes with, and what is said.
    """
    source = models.batches()
    model, optimizer, state = _begin("int8:start=1")
    steps(model, optimizer, source, 3)
    saved = [state.state_dict()]
    dist.broadcast_object_list(saved)
    model, optimizer, state = _begin("int8:start=1")
    remarks = Remarks()
    state.load_state_dict(saved[0])
    steps(model, optimizer, source, 2)
    return {"digest": digest(gathered(model)), "said": remarks.stop()}


def _begin(codec: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = paired(Groups.of("thalweg"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, compress(model, codec)


def said() -> dict[str, Any]:
    """Returns what is said of what is refused, left out, asked to be exact, and closed."""

    def of(action: Any) -> list[str]:
        remarks = Remarks()
        error = outcome(action)
        return [error, *remarks.stop()]

    def step(model: nn.Module) -> None:
        models.loss_of(model, next(models.batches())).backward()

    def freeze() -> None:
        model = paired(Groups.of("thalweg"))
        compress(model, "int8:start=0")
        for frozen in (True, False, True):
            model.blocks[0].wide.requires_grad_(frozen)
            step(model)

    def close() -> None:
        model = paired(Groups.of("thalweg"))
        compress(model, POWERSGD).close()
        step(model)

    mine = "fp16" if dist.get_rank() == 0 else "bf16"
    model = paired(Groups.of("thalweg"))
    return {
        "exact": of(lambda: compress(paired(Groups.of("thalweg")), "int8", copies="fp32")),
        "unknown": of(lambda: compress(model, "int8", copies="zip")),
        "gather": of(lambda: compress(model, POWERSGD, gather="onebit")),
        "unequal": of(lambda: compress(model, "int8", copies=mine)),
        "frozen": of(freeze),
        "closed": of(close),
    }


def asked_again() -> dict[str, Any]:
    """Returns digests of a step's gradients, of a model that was never compressed and of one whose
    sums are to be exact again, and the units of one that shards two modules together.
    """
    digests = []
    for asked in ((), (POWERSGD, "fp32")):
        model = paired(Groups.of("thalweg"))
        for copies in asked:
            compress(model, "int8", copies=copies)
        models.loss_of(model, next(models.batches())).backward()
        digests.append(digest([models.local(p.grad) for p in model.parameters()]))
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = fsdp2_cases.mesh_of(Groups.of("thalweg"), True)
    fully_shard([layers[0], layers[1]], mesh=mesh)
    units = [str(unit) for unit in units_of(fully_shard(layers, mesh=mesh))]
    return {"digests": digests, "units": units}


def both() -> dict[str, Any]:
    """Trains a model whose shards and copies cross nodes; returns losses, a digest and remarks, and
    losses without any change of a weight.
    """
    result: dict[str, Any] = {"untrained": models.plain_loop(models.build(WIDTH), lr=0.0, steps=4)}
    for name, asked in (("exact", {}), ("both", {"codec": "int8", "copies": POWERSGD})):
        model, remarks = paired(Groups.of("thalweg")), Remarks()
        if asked:
            compress(model, **asked)
        losses = models.plain_loop(model, lr=0.1, steps=4)
        result[name] = {"losses": losses, "digest": digest(gathered(model)), "said": remarks.stop()}
    result["refused"] = outcome(lambda: compress(model, POWERSGD))
    dist.barrier()  # nobody leaves while another one still learns that
    return result


def variants() -> dict[str, Any]:
    """Trains with options of fully_shard() and factors; returns, by case, losses without a codec,
    with it and of what the first step alone has trained, a digest of what a rank computes with, and
    what was said.
    """
    brain = torch.bfloat16
    cases: dict[str, dict[str, Any]] = {
        "uneven": {"width": 65},  # the second rank's shards are filled up
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=brain, reduce_dtype=brain)},
    }
    result = {}
    for name, options in cases.items():
        losses, remarks = [], Remarks()
        for codec in ("", "powersgd:rank=8,start=1"):
            model = paired(Groups.of("thalweg"), **options)
            state = compress(model, codec) if codec else None
            losses.append(models.plain_loop(model, lr=0.1, steps=4))
        first = paired(Groups.of("thalweg"), **options)
        models.plain_loop(first, lr=0.1, steps=1)
        losses.append(models.plain_loop(first, lr=0.0, steps=4))
        result[name] = {"losses": losses, "digest": digest(gathered(model)), "said": remarks.stop()}
        assert state is not None
        state.close()
    return result


def swapped_copies() -> dict[str, Any]:
    return swapped(hybrid=True)


def unmentioned() -> dict[str, Any]:
    return by_environment(lambda: paired(Groups.of("thalweg")))


JOBS = {
    job.__name__: job
    for job in (
        *(trained, delivered, recovered, whole_numbers, resumed, resumed_by_one),
        *(said, asked_again, both, variants, swapped_copies, unmentioned),
    )
}


def main() -> None:
    job_runner.run_joined(JOBS, "thalweg", timedelta(seconds=60))


if __name__ == "__main__":
    main()
