"""Gradients that no backward pass has pushed when a step is to end."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch

from thalweg.ps._bucket import Bucket
from thalweg.ps._parameters import Parameter
from thalweg.ps._rules import Group


def left(
    buckets: Sequence[Bucket], groups: Sequence[Group], *, with_none: bool
) -> list[tuple[Bucket, Parameter]]:
    """Returns the parameters that are still to be pushed: those with a gradient, as scripts make
    them by hand, or leave them after accumulate(); and those that have none if `with_none`.
    """
    found = [
        (bucket, each)
        for bucket in buckets
        for each in bucket.parameters
        if not bucket.has(each) and (with_none or each.has_gradient)
    ]
    begins = all(bucket.is_empty for bucket in buckets)
    return [] if begins and _are_for_show([each for _, each in found], groups) else found


def is_unused(parameter: Parameter) -> bool:
    """Whether no backward pass has made a gradient of it that changes anything."""
    grad = parameter.tensor.grad
    return grad is None or not parameter.has_gradient or not bool(grad.any())


def sparse_fault(parameter: Parameter) -> str:
    """Returns why its gradient cannot be pushed; empty: it can."""
    grad = parameter.tensor.grad
    if grad is None or not parameter.has_gradient or grad.layout == torch.strided:
        return ""
    return (
        f"{parameter.name} got a sparse gradient, which shards do not take: make its module with "
        "sparse=False, or leave it to an optimizer of torch's"
    )


def _are_for_show(parameters: Sequence[Parameter], groups: Sequence[Group]) -> bool:
    """Returns whether this is the step by which torch.distributed.checkpoint lets an optimizer make
    its state, which is to change nothing: it has a learning rate of 0, and zeros as gradients. One
    worker may take it alone; a step of a training with these all workers take.
    """
    if any(float(group["lr"]) for group in groups):
        return False
    grads = [each.tensor.grad for each in parameters if each.has_gradient]
    if not grads or any(bool(grad.any()) for grad in grads if grad is not None):
        return False
    callers = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return any(name.startswith("torch.distributed.checkpoint.") for name in callers)
