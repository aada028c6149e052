"""What surrounds an optimizer's step in mixed precision. The caller has disabled autograd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.amp._scaler import LossScaler


def gather(grads: Sequence[Tensor]) -> list[Tensor]:
    """Half-precision gradients as float32, copies; sparse ones stay sparse."""
    gathered = [torch.empty(0) if g.is_sparse else _empty_float(g) for g in grads]
    dense = [i for i, g in enumerate(grads) if not g.is_sparse]
    if dense:
        torch._foreach_copy_([gathered[i] for i in dense], [grads[i] for i in dense])
    for i, grad in enumerate(grads):
        if grad.is_sparse:
            gathered[i] = grad.coalesce().float()
    return gathered


def gather_unscaled(grads: Sequence[Tensor], scaler: LossScaler) -> list[Tensor]:
    """gather() and unscale(), in one pass where gradients are dense and on the CPU."""
    from thalweg._C import NotFusable, unscaled_grads  # not before there is a gradient

    try:
        gathered, is_finite = unscaled_grads(list(grads), scaler.loss_scale())
    except NotFusable:
        gathered = gather(grads)
        unscale(gathered, scaler)
        return gathered
    if scaler.dynamic and not is_finite:
        scaler.found_inf(torch.device("cpu")).fill_(1.0)
    return gathered


def gather_divided(grads: Sequence[Tensor], scale: float) -> list[Tensor]:
    """gather() of dense gradients, divided by `scale`."""
    from thalweg._C import NotFusable, unscaled_grads

    try:
        gathered, _ = unscaled_grads(list(grads), scale)
    except NotFusable:
        gathered = gather(grads)
        torch._foreach_mul_(gathered, 1.0 / scale)
    return gathered


def unscale(grads: Sequence[Tensor], scaler: LossScaler) -> None:
    """Divides in place by the scale; notes in `scaler.found_inf` what is not finite.

    A static scale is divided out without a look.
    """
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        alike[values.device, values.dtype].append(values)
    for (device, _), tensors in alike.items():
        if scaler.dynamic:
            inverse = torch.full((), 1.0 / scaler.loss_scale(), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                tensors, scaler.found_inf(device), inverse
            )
        else:
            torch._foreach_mul_(tensors, 1.0 / scaler.loss_scale())


def publish(
    masters: Sequence[Tensor], params: Sequence[Tensor], *, stored: Sequence[Tensor] = ()
) -> None:
    """Rounds masters into the parameters of the model, to nearest even.

    `stored`: masters or parameters, whichever the optimizer's step has read gradients of, if it has
    done so already for those that have one.
    """
    if stored:
        left = [i for i, holder in enumerate(stored) if holder.grad is None]
        masters, params = [masters[i] for i in left], [params[i] for i in left]
    if masters:
        torch._foreach_copy_(list(params), list(masters))


def _empty_float(grad: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=torch.float32)
