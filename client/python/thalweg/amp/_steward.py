"""What mixed precision adds to one optimizer: masters, gradients divided by the scale, skips.

The optimizer stays the object it was. Its step is entered through torch's step hooks, not replaced:
a scheduler that was built before or after sees nothing. A step is skipped by hiding all gradients
from it, which every optimizer takes for parameters that were not used: no state advances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thalweg.amp._casts import casting
from thalweg.amp._gradients import MasterGradients, grad_of
from thalweg.amp._masters import Master, ensure_master
from thalweg.amp._scaler import LossScaler
from thalweg.amp._state import state
from thalweg.amp._update import publish, unscale
from thalweg.optim._copies import ask_for_copies, forget_copies, take_stored
from thalweg.optim._norm import drop_norm

HALF_TYPES = (torch.float16, torch.bfloat16)


class Steward:
    """Of one optimizer; `steward_of` finds it. One thread: the training loop's.

    Gradients go `begin`, backward, `end` under a scale of this package. Under torch's GradScaler
    (`native`) they stay in the model, multiplied by its scale, until `materialise` shows them.
    """

    def __init__(self, optimizer: Optimizer, *, masters: bool, native: bool = False) -> None:
        self.optimizer = optimizer
        self.keeps_masters = masters
        self.native = native
        self.skip = False
        self.pending: float | None = None  # the scale that gradients still carry
        self._grads = MasterGradients(optimizer)
        self._masters: list[Master] = []  # in the order of self._grads
        self._own: list[Parameter] = []  # the others, which are in the model themselves
        self._stash: dict[int, Tensor] = {}  # gradients from before begin(), by id of parameter
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._materialised = False
        self._zero_grad = optimizer.zero_grad
        self._add_param_group = optimizer.add_param_group
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
        optimizer.__dict__["_amp_steward"] = self
        self._adopt()

    def retire(self) -> None:
        """The optimizer is on its own again; parameters that have masters keep them."""
        self._grads.forget()
        for hook in self._hooks:
            hook.remove()
        for name in ("zero_grad", "add_param_group", "_amp_steward"):
            self.optimizer.__dict__.pop(name, None)
        forget_copies(self.optimizer)

    def targets(self) -> Iterator[Tensor]:
        """All parameters that the optimizer updates: masters in place of what they stand for."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimizer.add_param_group; half-precision parameters get masters."""
        self._grads.look()
        self._add_param_group(param_group)
        self._adopt()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Optimizer.zero_grad, of masters and of the model's parameters alike.

        None: what the optimizer does by default; the model's own have their gradients removed.
        """
        self._grads.clear()
        if set_to_none is None:
            self._zero_grad()
            set_to_none = True
        else:
            self._zero_grad(set_to_none)
        for param in self._grads.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        self._stash.clear()
        self.pending = None
        self.skip = self._materialised = False

    @torch.no_grad()
    def begin(self, scaler: LossScaler) -> None:
        """Before a backward: sets aside what is finished, for only new gradients to be divided."""
        scale = scaler.loss_scale()
        self._grads.begin()
        if self.pending is not None:
            if self.pending != scale:
                for source in self._sources():
                    if source.grad is not None:
                        source.grad.mul_(scale / self.pending)
                self.pending = scale
            return
        for param in self._grads.params:
            param.grad = None
        if scaler.trivial:
            return
        for target in self._own:
            if target.grad is not None:
                self._stash[id(target)] = _unshared(target.grad)
                target.grad = None

    @torch.no_grad()
    def end(self, scaler: LossScaler, *, delay_unscale: bool, done: set[int]) -> None:
        """After a backward: divides its gradients and adds them to those that were set aside.

        `done`: ids of parameters that other optimizers have seen to; gets those of this one.
        """
        if delay_unscale:
            self.pending = scaler.loss_scale()
            return
        self.pending = None
        own = [p for p in self._own if p.grad is not None and id(p) not in done]
        done.update(map(id, own))
        if not scaler.trivial:
            unscale([grad_of(param) for param in own], scaler)
        self._grads.take(scaler, done)
        for target in own:
            before = self._stash.pop(id(target), None)
            if before is not None and target.grad is not None:
                target.grad = before.add_(target.grad)
        self._restore()

    def abandon(self) -> None:
        """The backward has failed: gradients are what they were before."""
        for param in self._own:
            if id(param) in self._stash:
                param.grad = None
        self._restore()
        self.pending = None

    @torch.no_grad()
    def materialise(self, *, again: bool = True, before_step: bool = False) -> None:
        """Gives masters the model's gradients, as they are; only for `native`.

        Only now have they all been accumulated and averaged over workers: DistributedDataParallel
        writes its results after the hooks of the parameters have run.

        Args:
            again: even if they have got gradients since the last step.
            before_step: the optimizer's step follows, so that they may be deferred.
        """
        if self.native and (again or not self._materialised):
            self._materialised = self._grads.take_as_they_are(before_step=before_step)

    def _adopt(self) -> None:
        """Puts masters in the places of half-precision parameters, with the state they have."""
        known = {id(param) for param in self._own} | {id(m.weight) for m in self._masters}
        for group in self.optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if id(param) in known:
                    continue
                if not self.keeps_masters or param.dtype not in HALF_TYPES:
                    self._own.append(param)
                    continue
                master = ensure_master(param)
                group["params"][i] = master.weight
                if param in self.optimizer.state:
                    self.optimizer.state[master.weight] = self.optimizer.state.pop(param)
                self._grads.params.append(param)
                self._grads.weights.append(master.weight)
                self._masters.append(master)
        if self._masters:
            pairs = zip(self._grads.weights, self._grads.params, strict=True)
            ask_for_copies(self.optimizer, pairs)

    def _sources(self) -> list[Tensor]:
        """Parameters of the model, in which backward leaves gradients."""
        return [*self._grads.params, *self._own]

    def _restore(self) -> None:
        """Puts back gradients that were set aside and met no new ones."""
        for param in self._own:
            before = self._stash.pop(id(param), None)
            if before is not None:
                param.grad = before
        self._stash.clear()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if closure is not None and (self._masters or not state.trivial):
            raise RuntimeError(
                "step() was given a closure, expected none: mixed precision cannot run one. Call "
                "backward under scale_loss, then step()"
            )
        if self.pending is not None:
            raise RuntimeError(
                "step() was called while gradients are still multiplied by the loss scale: leave "
                "out delay_unscale in the last scale_loss before step()"
            )
        if not self.skip:
            self._grads.check()
        casting.stepping = True  # functions that the step uses compute in float32
        if self.skip:
            self._grads.forget()
            self._hidden = [(p, p.grad) for p in self.targets() if p.grad is not None]
            for param, _grad in self._hidden:
                param.grad = None
            return
        self.materialise(again=False, before_step=True)
        for param, master in zip(self._grads.params, self._masters, strict=True):
            master.follow(param)

    @torch.no_grad()
    def _after_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        casting.stepping = False
        stored = take_stored(self.optimizer)
        read = self._grads.end_step()
        if self.skip:
            for param, grad in self._hidden:
                param.grad = grad
            self._hidden = []
            drop_norm(self.optimizer)
        else:
            publish(self._grads.weights, self._grads.params, stored=read if stored else ())
            for param, master in zip(self._grads.params, self._masters, strict=True):
                master.mark_equal(param)
        for weight in self._grads.weights:
            weight.grad = None
        self.skip = self._materialised = False


def _unshared(grad: Tensor) -> Tensor:
    """`grad`, copied if it lies in a bucket of DistributedDataParallel, which is written again."""
    return grad.clone() if grad._is_view() else grad


def steward_of(optimizer: object) -> Steward | None:
    """What `initialize`, `init` or a decoration has given an optimizer."""
    steward: Steward | None = getattr(optimizer, "__dict__", {}).get("_amp_steward")
    return steward


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that `optimizer.step()` updates, with gradients to be clipped.

    Yields:
        float32 masters of half-precision parameters, other parameters as they are, in the order of
        `param_groups`. Under GradScaler, gradients are divided by its scale after `unscale_`.
    """
    steward = steward_of(optimizer)
    if steward is not None:
        steward.materialise(again=False)
    for group in optimizer.param_groups:
        yield from group["params"]
