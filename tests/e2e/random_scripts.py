"""Runs training scripts drawn at random, plainly and through Thalweg: `random_scripts.py NAME OUT`
runs a job for the seeds of RANDOM_SCRIPTS.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from jobs import job, main
from random_plans import WORLD, Plan, draw, read_seeds, without_float16, without_skipped_steps
from random_training import run

LR = 0.02
FLOAT = 2.0**-24  # the relative error of a rounding
CODECS = (
    "fp16",
    "bf16",
    "int8:start={start}",
    "onebit:start={start}",
    "topk:ratio=0.05,start={start}",
    "powersgd:rank=2,start={start}",
)


def each_plan(check: Callable[[Plan], list[str]]) -> list[str]:
    """Returns what is wrong, by seed. A plan that raises ends the process, after its text."""
    found = []
    gc.freeze()  # otherwise each collection looks at all of torch
    for seed in read_seeds(os.environ["RANDOM_SCRIPTS"]):
        plan = draw(seed)
        if any(script.compiled for script in plan.scripts):
            torch._dynamo.reset()
        try:
            wrong = check(plan)
        except BaseException:
            print(f"seed {seed} raised: {plan}", flush=True)
            raise
        if wrong:
            found.append("\n".join([f"seed {seed}: {plan}", *wrong]))
    return found


def compare(plan: Plan) -> list[str]:
    plan = without_float16(plan)
    plain, ours = run(plan, None, LR), run(plan, "fp32", LR)
    losses = [float.fromhex(loss) for *losses, _ in plain.steps for loss in losses]
    assert all(loss < 1e6 for loss in losses), losses  # numbers that overflow show nothing
    return [
        f"  step {number // len(plan.scripts)}, module {number % len(plan.scripts)}: "
        f"losses and parameters are {got}, expected {expected}"
        for number, (got, expected) in enumerate(zip(ours.steps, plain.steps, strict=True))
        if got != expected
    ][:1]


def allowed(
    steps: int, codec: str, dtype: torch.dtype, *, elems: int, local: float, applied: float
) -> float:
    """Returns how much rounding may contribute to the norm of what is missing of a parameter.

    Let S be the sum over the N steps of the norms of a rank's gradients, the larger of both ranks'
    (`local`), and A that of the norms of the averages that were applied. u is the relative error of
    a rounding in float32, so that rounding an array adds at most u times its norm.

    A node has a gradient and a residual E. Top-k leaves out elements, int8 rounds, and 1-bit is a
    projection of a block, so that none makes |E| larger than the sum of gradients so far: |E| ≤ S.
    For PowerSGD that holds of the mean of both nodes' E; the difference of both is that of the sums
    of their gradients. So |E| ≤ 2 S, the node's rounded sum of both and its new residual ≤ 3 S.
    A shard takes contributions of at most S each, and so has a residual of at most N S. It rounds a
    product, a sum, a quotient, the sum with the residual, and the new residual: twice (N + 1) S or
    less. Torch rounds a mean of at most S. In all, for each step: 2 · 3 S + 5 · 2 (N + 1) S + S.

    A tensor in 16 bits on the wire, because of its codec, the rule for small tensors or its own
    type, has no residual for what the node's and the shard's rounding lose: twice its relative
    error w of S; and where its result is rounded to its own type, of A. Torch rounds so, too. What
    is below fp16's smallest normal number loses at most 2^-25 of an element each time.
    """
    result = steps * FLOAT * (10 * steps + 17) * local
    small = elems < 1024 and codec.partition(":")[0] in ("int8", "onebit", "topk")
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(codec)
    types = [torch.float16] if small else [] if wire is None else [wire]
    if dtype in (torch.float16, torch.bfloat16):
        types.append(dtype)
    for kind in types:
        result += 3 * torch.finfo(kind).eps / 2 * (1 + 2.0**-7) * (local + applied)
        if kind == torch.float16:
            result += steps * 3 * 2.0**-25 * elems**0.5
    return result


def deliver(plan: Plan) -> list[str]:
    plan = without_skipped_steps(plan)
    plain = run(plan, None, 0)
    wrong = []
    for codec in (codec.format(start=plan.start) for codec in CODECS):
        ours = run(plan, codec, 0)
        for key in sorted(plain.sums.keys() | ours.sums.keys()):
            true, got = plain.sums[key], ours.sums[key]
            zero = torch.zeros(true.numel(), dtype=torch.float64)
            on_node, on_shards = ours.held.get(key, (zero, zero))
            held = on_node / WORLD + on_shards
            dist.all_reduce(held)
            local = torch.tensor(plain.local[key])
            dist.all_reduce(local, dist.ReduceOp.MAX)
            missing = (true - got - held.reshape(true.shape)).norm().item()
            bound = allowed(
                len(plan.scripts[0].steps),
                codec,
                ours.types[key],
                elems=true.numel(),
                local=local.item(),
                applied=ours.applied[key],
            )
            if not missing <= bound:
                module, name = key
                wrong.append(
                    f"  {codec}, module {module}, {name} {tuple(true.shape)}: {missing:.3g} is "
                    f"missing of gradients whose norms sum to {local.item():.3g}, expected "
                    f"{bound:.3g} or less"
                )
    return wrong


@job
def equal() -> list[str]:
    return each_plan(compare)


@job
def delivered() -> list[str]:
    return each_plan(deliver)


@job
def both() -> dict[str, list[str]]:
    return {"equal": equal(), "delivered": delivered()}


if __name__ == "__main__":
    main()
