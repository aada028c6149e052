"""Implements the base of LAMB and apex's Adam: two float32 moments, and a step without kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from thalweg.optim._counts import fallbacks
from thalweg.optim._fused import FusedMixin
from thalweg.optim._norm import Norm
from thalweg.optim._refusals import remembered_refusals
from thalweg.optim._settings import SettingsMixin
from thalweg.optim._shards import local_grad, local_of, local_state
from thalweg.optim._steps import grad_scale

_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEPT = (torch.float32, torch.float64)  # types of weights that are updated where they are


class Batch(NamedTuple):
    """A group's parameters that have gradients, with the same index in each list; float32, but for
    weights of float64.

    Of DTensors it holds this process's part.
    """

    params: list[Tensor]  # as the optimizer has them: whole DTensors, in any type
    weights: list[Tensor]
    grads: list[Tensor]  # copies that may be overwritten
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[float]  # counted from 1


class MomentOptimizer(FusedMixin, SettingsMixin, Optimizer):
    """Base with state `step`, `exp_avg` and `exp_avg_sq` as in torch's Adam, moments in float32.

    `state_dict` is interchangeable with Adam's. A parameter without gradient is unchanged, and its
    step does not advance. What the kernels cannot update takes torch's multi-tensor operations, and
    is counted in `thalweg.optim.fallbacks`.
    """

    def __init__(
        self,
        params: Any,  # noqa: ANN401
        defaults: dict[str, Any],
        *,
        set_grad_none: bool,
    ) -> None:
        self._set_grad_none = set_grad_none
        _check(defaults)
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Is Optimizer.load_state_dict, with moments in float32, and takes checkpoints of torch's
        and apex's Adam.

        Settings that a group lacks there stay what they are. Decay stays as `adam_w_mode` has it,
        whatever `decoupled_weight_decay` says, and a group's `step` is that of its parameters.
        """
        kept = [{name: g[name] for name in self.defaults if name in g} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, kept, strict=True):
            for name, value in {**self.defaults, **own}.items():
                group.setdefault(name, value)
            group.pop("decoupled_weight_decay", None)
            self._spread_count(group)

    def _spread_count(self, group: dict[str, Any]) -> None:
        """Gives a group's `step`, as apex counts, to each of its parameters that has moments."""
        step = group.pop("step", None)
        for param in group["params"] if step is not None else ():
            state = self.state.get(param)
            if state:
                count = torch.tensor(float(step), dtype=torch.float32, device="cpu")
                state.setdefault("step", count)

    def _step_fused(self) -> None:
        with remembered_refusals(self):
            super()._step_fused()

    def _step_unfused(self, reason: RuntimeError) -> None:
        """Raises RuntimeError if a gradient is sparse, before anything is changed."""
        self._norm = None
        scale = grad_scale(self)
        if scale is None:
            return
        refuse_unusable(self, "torch.optim.SparseAdam")
        read = [self._grads(group, 1 / scale) for group in self.param_groups]
        batches = [self._batch(params, grads) for params, grads in read]
        norm = self._global_norm(batches)
        if norm is not None:
            self._norm = Norm(norm.square(), None)
        for group, batch in zip(self.param_groups, batches, strict=True):
            if batch.params:
                self._update(group, batch, norm)
                rounded = [i for i, p in enumerate(batch.params) if p.dtype not in _KEPT]
                if rounded:
                    torch._foreach_copy_(
                        [local_of(batch.params[i]) for i in rounded],
                        [batch.weights[i] for i in rounded],
                    )
                increment_version(batch.params)  # DTensors do not notice writes to their parts
        fallbacks[str(reason).removeprefix("thalweg: ")] += 1

    @abstractmethod
    def _update(self, group: dict[str, Any], batch: Batch, norm: Tensor | None) -> None:
        """Writes new values into `batch.weights`."""

    def _global_norm(self, batches: list[Batch]) -> Tensor | None:
        """Returns the norm of all gradients together, where `_update` needs it."""
        return None

    def _grads(self, group: dict[str, Any], factor: float) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parameters that have gradients, and copies of these times `factor`.

        Raises NotFusable if a gradient is not placed like its parameter's state.
        """
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            for moment in map(self.state.get(param, {}).get, _MOMENTS):
                if moment is not None:
                    local_state(param, moment)
        grads = [local_grad(param).to(torch.float32, copy=True) for param in params]
        if group["maximize"]:
            factor = -factor
        if grads and factor != 1:
            torch._foreach_mul_(grads, factor)
        return params, grads

    def _batch(self, params: list[Tensor], grads: list[Tensor]) -> Batch:
        """Counts a step of each parameter; makes the state of those that have none."""
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for key in _MOMENTS:
                    state[key] = torch.zeros_like(param, dtype=torch.float32)
            state["step"] += 1
        held = [local_of(param) for param in params]
        return Batch(
            params,
            [self._weight(param, part) for param, part in zip(params, held, strict=True)],
            grads,
            [local_state(param, self.state[param]["exp_avg"]) for param in params],
            [local_state(param, self.state[param]["exp_avg_sq"]) for param in params],
            [float(self.state[param]["step"]) for param in params],
        )

    def _weight(self, param: Tensor, held: Tensor) -> Tensor:
        """Returns what is updated: `held`, the parameter's part, or in float32 what is rounded into
        it afterwards.
        """
        return held.detach() if held.dtype in _KEPT else held.float()


def adam_updates(group: dict[str, Any], batch: Batch, grad_share: float) -> list[Tensor]:
    """Updates the moments, and returns what to subtract, times lr, from each weight.

    m = β1·m + grad_share·g, v = β2·v + (1-β2)·g²; u = (m/c1) / (√(v/c2) + ε) with the bias
    corrections c = 1-β^step, where the group asks for them. `adam_w_mode` adds λ·w to u, otherwise
    to g beforehand. `batch.grads` is overwritten.
    """
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    grads = batch.grads
    if decay != 0 and not group["adam_w_mode"]:
        torch._foreach_add_(grads, batch.weights, alpha=decay)
    torch._foreach_mul_(batch.exp_avgs, beta1)
    torch._foreach_add_(batch.exp_avgs, grads, alpha=grad_share)
    torch._foreach_mul_(batch.exp_avg_sqs, beta2)
    torch._foreach_addcmul_(batch.exp_avg_sqs, grads, grads, 1 - beta2)
    corrected = group["bias_correction"]
    first = [1 - beta1**step if corrected else 1.0 for step in batch.steps]
    second = [(1 - beta2**step if corrected else 1.0) ** 0.5 for step in batch.steps]
    denominators = torch._foreach_sqrt(batch.exp_avg_sqs)
    torch._foreach_div_(denominators, second)
    torch._foreach_add_(denominators, group["eps"])
    updates: list[Tensor] = list(torch._foreach_div(batch.exp_avgs, denominators))
    torch._foreach_div_(updates, first)
    if decay != 0 and group["adam_w_mode"]:
        torch._foreach_add_(updates, batch.weights, alpha=decay)
    return updates


def subtract(batch: Batch, updates: Iterable[Tensor], lr: float | Tensor) -> None:
    """Does weights -= lr·updates; the updates are overwritten."""
    scaled = list(updates)
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = lr.item()  # weights may be on another device
    torch._foreach_mul_(scaled, lr)
    torch._foreach_sub_(batch.weights, scaled)


def refuse_unusable(optimizer: Optimizer, other: str = "") -> None:
    """Raises RuntimeError if a gradient is complex, or sparse; names the `other` optimizer that
    takes it.
    """
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if param.grad is not None and param.is_complex():
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is {param.dtype}, expected real "
                f"numbers: {type(optimizer).__name__} cannot update it, torch.optim.Adam can"
            )
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has a sparse gradient, expected a "
                f"dense one: {type(optimizer).__name__} cannot update it"
                + (other and f", {other} can")
            )


def _check(defaults: dict[str, Any]) -> None:
    beta1, beta2 = defaults["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas are {defaults['betas']}, expected two from 0 to below 1")
    for name in ("lr", "eps", "weight_decay"):
        if not float(defaults[name]) >= 0.0:
            raise ValueError(f"{name} is {defaults[name]}, expected 0 or more")
