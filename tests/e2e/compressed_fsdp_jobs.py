"""Contains jobs that compress what sharded models send: `compressed_fsdp_jobs.py NAME OUT`.

FOLDER is where checkpoints lie. PART has the bytes of a row's parts, if not the usual ones.
"""

import os
from datetime import timedelta
from typing import Any

import fsdp_models as models
import job_runner
import torch
import torch.distributed as dist
from compressed_fsdp_cases import (
    WIDTH,
    by_environment,
    gathered,
    held_by,
    left_out,
    refused,
    resharded,
    resumed,
    resumed_by_environment,
    sharded,
    swapped,
    variants,
)
from digests import digest
from job_runner import sent_bytes
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from thalweg.fsdp import compress


def gradients(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """Returns this rank's shards of the gradient of a batch, so many times, summed in float64."""
    batch, sums = next(models.batches()), [torch.zeros(1).double() for _ in model.parameters()]
    for _ in range(steps):
        model.zero_grad()
        models.loss_of(model, batch).backward()
        for index, parameter in enumerate(model.parameters()):
            sums[index] = sums[index] + models.local(parameter.grad).double()
    return sums


def parameters() -> dict[str, Any]:
    """Returns, by codec, a digest of what a rank gathers, how far it is from what is kept at most,
    in units of what the codec may round away, and whether what is kept stayed as it is.
    """
    result = {}
    for codec in ("fp16", "bf16", "int8"):
        model = sharded()
        before = [models.local(p) for p in model.parameters()]
        whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        compress(model, codec)
        found = gathered(model)
        asynchronously = {}
        for block in model.blocks:
            block.unshard(async_op=True).wait()
            asynchronously |= {f"{id(block)}.{n}": p.clone() for n, p in block.named_parameters()}
            block.reshard()
        # No scale is larger than the tensor's largest element / 125, and rounding takes half of it.
        unit = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 125 + 2.0**-22}[codec]
        apart = [
            float((found[name] - value).abs().max() / value.abs().max() / unit)
            for name, value in whole.items()
            if value.any()
        ]
        small = all(
            torch.equal(found[name], whole[name]) for name in whole if whole[name].numel() < 1024
        )
        result[codec] = {
            "digest": digest(found),
            "asynchronous": digest(list(asynchronously.values()))
            == digest([found[n] for n in found if n.startswith("blocks.")]),
            "apart": max(apart),
            "small are exact": small,
            "kept": all(
                torch.equal(a, models.local(b))
                for a, b in zip(before, model.parameters(), strict=True)
            ),
        }
    return result


def whole_numbers() -> dict[str, list[bool]]:
    """Trains a layer in whole numbers that all types hold; returns, by codec and operation, whether
    gradients and parameters have the bits of those without a codec.
    """

    def trained(codec: str, factor: float) -> list[torch.Tensor]:
        layer = nn.Linear(32, 64, bias=False)
        source = torch.Generator().manual_seed(7)
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-4, 5, (64, 32), generator=source))
        model = fully_shard(layer)
        assert isinstance(model, FSDPModule)
        if factor:
            model.set_gradient_divide_factor(factor)
        if codec:
            compress(model, codec)
        source.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.randint(-2, 3, (4, 32), generator=source).float()).sum()).backward()
            optimizer.step()
        return [models.local(layer.weight), models.local(layer.weight.grad)]

    return {
        f"{codec} {factor:g}": [
            torch.equal(a, b)
            for a, b in zip(trained(codec, factor), trained("", factor), strict=True)
        ]
        for codec in ("fp16", "bf16")
        for factor in (0.0, 0.5)
    }


def feedback() -> dict[str, float]:
    """Returns how far sums of 20 gradients are from those without a codec for gradients: with what
    was left out added later, without, and how far the first may be.

    The mean of node i is at most w G / R for w of R workers, and what is held back of it, r, at
    most 1 / 250 of the largest of mean + r: r <= w G / R / 249. This is missing, for each other
    node: less than G / 249 together. Sums of float32 round twice for each node and step.
    """
    steps, results = 20, {}
    for name, codec in (
        ("true", "int8:start=1000"),
        ("with", "int8:start=0"),
        ("without", "int8:start=0,feedback=0"),
    ):
        model = sharded()
        compress(model, codec, gather="bf16")
        results[name] = gradients(model, steps)
    rounding = steps * 2 * int(os.environ["NODES"]) * 2.0**-24 * steps
    apart = {
        name: max(
            float((a - b).abs().max())
            for a, b in zip(results[name], results["true"], strict=True)
            if a.numel()
        )
        for name in ("with", "without")
    }
    return apart | {"bound": _largest_gradient() * (1 / 249 + rounding)}


def _largest_gradient() -> float:
    """Returns G: the largest element of any rank's gradient, with parameters in bf16."""
    model = models.build(WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    models.loss_of(model, next(models.batches())).backward()
    grads = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    largest = torch.stack(grads).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def poisoned() -> dict[str, list[bool]]:
    """Spoils the loss of rank 0 in the second of three steps; returns, by codec and step, whether
    all gradients of this rank are finite, and in the end whether what is held back is, and whether
    as many elements were counted as were not finite.
    """
    result = {}
    for codec in ("fp16", "bf16", "int8:start=0", "int8:start=2"):
        model = sharded()
        state = compress(model, codec)
        source, finite, spoiled = models.batches(), [], 0
        for step in range(3):
            model.zero_grad()
            loss = models.loss_of(model, next(source))
            (loss * (float("nan") if step == 1 and dist.get_rank() == 0 else 1)).backward()
            shards = [models.local(p.grad) for p in model.parameters()]
            finite.append(all(bool(one.isfinite().all()) for one in shards))
            spoiled += sum(int((~one.isfinite()).sum()) for one in shards)
        held = held_by(state)
        finite.append(all(bool(one.isfinite().all()) for one in held.values()))
        result[codec] = [*finite, state.nonfinite_elems == spoiled > 0]
    return result


def carried() -> dict[str, float]:
    """Returns how many bytes of values this node sends in a step, by codec."""
    result = {}
    for codec in ("fp32", "bf16", "fp16", "int8"):
        model = sharded(width=int(os.environ["WIDTH"]))
        if codec != "fp32":
            compress(model, codec)
        models.plain_loop(model, lr=0.1, steps=2)
        before = sent_bytes()
        models.plain_loop(model, lr=0.1, steps=4)
        result[codec] = (sent_bytes() - before) / 4
    return result


def grouped() -> list[dict[str, Any]]:
    """Lets the first and the last rank make a group by themselves after compress(), of this back
    end, and then, when the others know one group less, of Gloo. Returns their sums of ones, and the
    gradients.
    """
    ends, result = [0, dist.get_world_size() - 1], []
    for backend in ("thalweg", "gloo"):
        model = fully_shard(models.build(WIDTH))
        compress(model, "int8:start=0")
        models.loss_of(model, next(models.batches())).backward()
        grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        ones = torch.ones(1)
        if dist.get_rank() in ends:
            group = dist.new_group(ends, backend=backend, use_local_synchronization=True)
            dist.all_reduce(ones, group=group)
        result.append({"sum": float(ones), "digest": digest(grads)})
    return result


JOBS = {
    job.__name__: job
    for job in (
        *(parameters, whole_numbers, feedback, resumed, poisoned),
        *(refused, variants, left_out, swapped, carried, grouped),
        *(by_environment, resumed_by_environment, resharded),
    )
}


def main() -> None:
    job_runner.run_joined(JOBS, "thalweg", timedelta(seconds=60))


if __name__ == "__main__":
    main()
