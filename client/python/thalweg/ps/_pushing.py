"""Hooks of parameters, which push each gradient as soon as the backward pass has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from thalweg.ps._bucket import Bucket
from thalweg.ps._left import sparse_fault
from thalweg.ps._parameters import Parameter

if TYPE_CHECKING:
    from thalweg.ps._optimizer import ServerOptimizer

# By parameter: a weak reference to the ServerOptimizer that was made for it last.
_owners: Any = WeakIdKeyDictionary()


def watch(optimizer: ServerOptimizer, bucket: Bucket, parameter: Parameter) -> Any:  # noqa: ANN401 - torch's handle of the hook
    """Pushes the parameter's gradients, in its bucket, for `optimizer`, which owns it from now on.

    In the backward pass RuntimeError, which ends the job, is raised if another one does by then, or
    the gradient is sparse.
    """
    ref = weakref.ref(optimizer)  # parameters may outlive it
    _owners[parameter.tensor] = ref

    def hook(tensor: Tensor) -> None:
        ours = ref()
        if ours is None or ours.accumulates:
            return
        if _owners.get(tensor, ref)() not in (ours, None):
            ours._serving.fail(
                f"{parameter.name} belongs to another ServerOptimizer, which was made later: "
                "call close() of the former one before"
            )
        if fault := sparse_fault(parameter):
            ours._serving.fail(fault)
        ours._serving.gather(bucket, parameter, ours.param_groups, ours.state)

    return parameter.tensor.register_post_accumulate_grad_hook(hook)


def disown(optimizer: ServerOptimizer, parameters: Iterable[Parameter]) -> None:
    """Lets another optimizer have what `optimizer` owns of the parameters."""
    for each in parameters:
        owner = _owners.get(each.tensor)
        if owner is not None and owner() is optimizer:
            del _owners[each.tensor]
