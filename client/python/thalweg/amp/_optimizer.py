"""Mixed precision of one optimizer: masters, gradients divided by the scale, skipped steps.

The optimizer stays the object it was. Its step is entered through torch's step hooks, not replaced,
so a scheduler that was built before or after sees nothing. A step is skipped by hiding all
gradients from it: every optimizer takes parameters without gradients for unused ones, and no state
advances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thalweg.amp._casts import casting
from thalweg.amp._masters import MasterSet, ensure_master, give_gradients
from thalweg.amp._scaling import BackwardPass, LossScaler, unscale, unshared
from thalweg.amp._state import AmpStash
from thalweg.amp._step_hooks import have_step_run_hooks, with_casts
from thalweg.optim._copies import forget_copies, take_stored
from thalweg.optim._norm import drop_norm

_ATTRIBUTE = "_amp_mixed_optimizer"
_UNSCALED = LossScaler(1.0)


class MixedOptimizer:
    """The mixed precision of one optimizer; `mixed_optimizer_of` finds it.

    Under a scale of this package, a backward pass lies between `begin_backward` and `end_backward`.
    Under torch's GradScaler (`native`), gradients stay in the model, multiplied by its scale, until
    `fill_masters` gives them to the masters. Only the thread of the training loop may use it.
    """

    def __init__(
        self, optimizer: Optimizer, *, masters: bool, scales: bool = True, native: bool = False
    ) -> None:
        """`masters`: half-precision parameters get them. `scales`: losses are scaled."""
        self.optimizer = optimizer
        self.scales = scales
        self.native = native
        self.skip = False  # whether the next step does nothing
        self._pending: float | None = None  # the scale that gradients still carry
        self._delayed: list[BackwardPass] = []  # those that have given these gradients
        self._stash: dict[int, Tensor] = {}  # gradients from before a backward, by id of parameter
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._filled = False
        self._begun = False  # whether there has been a backward under a scale of this package
        self._held = MasterSet(optimizer, ensure_master if masters else None)
        self._zero_grad = optimizer.zero_grad
        self._add_param_group = optimizer.add_param_group
        have_step_run_hooks(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
        optimizer.__dict__[_ATTRIBUTE] = self
        stash = AmpStash(optimizer, self._held, lambda: self._pending is not None)
        stash.put_into_optimizer()

    def retire(self) -> None:
        """Leaves the optimizer to itself again, with the parameters that it was given.

        These keep their masters: another MixedOptimizer finds them.
        """
        for hook in self._hooks:
            hook.remove()
        for name in ("zero_grad", "add_param_group", _ATTRIBUTE, *AmpStash.NAMES):
            self.optimizer.__dict__.pop(name, None)
        self._held.give_back()
        forget_copies(self.optimizer)

    def params_by_master(self) -> dict[int, Parameter]:
        """Returns the half-precision parameters by the id of their master."""
        return self._held.params_by_weight()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does Optimizer.add_param_group; half-precision parameters get masters."""
        self._add_param_group(param_group)
        self._held.adopt()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does Optimizer.zero_grad, for masters and for the model's parameters alike.

        With None, masters are cleared as the optimizer does by default, and the parameters that
        have masters lose their gradients.
        """
        if set_to_none is None:
            self._zero_grad()
            set_to_none = True
        else:
            self._zero_grad(set_to_none)
        for param in self._held.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        for master in self._held.masters:
            master.note_source(None)
            master.watch.forget()
        self._stash.clear()
        self._pending = None
        self._delayed = []
        self.skip = self._filled = False

    @torch.no_grad()
    def begin_backward(self, scaler: LossScaler, *, done: set[int]) -> None:
        """Sets finished gradients aside, so that only those of the next backward are divided.

        `done`: ids of parameters whose gradients other optimizers have given this scale. It is
        extended by those of this one.
        """
        self._begun = True
        scale = scaler.loss_scale()
        if self._pending is not None:
            if self._pending != scale:
                for source in [*self._held.params, *self._held.own]:
                    if source.grad is not None and id(source) not in done:
                        source.grad.mul_(scale / self._pending)
                        done.add(id(source))
                self._pending = scale
            return
        self._held.drop_old_gradients()
        if scaler.trivial:
            return
        for target in self._held.own:
            if target.grad is not None:
                self._stash[id(target)] = unshared(target.grad)
                target.grad = None

    @torch.no_grad()
    def end_backward(self, this: BackwardPass, *, delay_unscale: bool, done: set[int]) -> None:
        """Divides the backward's gradients and adds them to those that were set aside.

        Args:
            this: under the scaler of `begin_backward`, which learns whether gradients are finite.
            delay_unscale: leave gradients multiplied, for further backwards to add to them.
            done: ids of parameters that other optimizers have seen to. It is extended by those of
                this one.
        """
        scaler = this.scaler
        if delay_unscale:
            self._pending = scaler.loss_scale()
            self._delayed.append(this)
            return
        scaler.join(self._delayed)
        self._pending, self._delayed = None, []
        pairs = self._held.pairs()
        used = [(p, master) for p, master in pairs if p.grad is not None and id(p) not in done]
        own = [p for p in self._held.own if p.grad is not None and id(p) not in done]
        done.update(id(param) for param in [*(param for param, _ in used), *own])
        give_gradients(used, scaler)
        unscale([param.grad for param in own if param.grad is not None], scaler)
        for target in own:
            before = self._stash.pop(id(target), None)
            if before is not None and target.grad is not None:
                target.grad = before.add_(target.grad)
        done.update(self._stash)  # what is put back has been divided by an earlier backward
        self._restore()

    def abandon_backward(self, this: BackwardPass) -> None:
        """Puts gradients back as they were before a backward that has failed.

        Where they accumulate in the model, under a scale of 1 or after `delay_unscale`, they keep
        what it has added, as in torch, and the scale that they carry.
        """
        if self._pending is not None:
            self._delayed.append(this)
        if self._pending is not None or this.scaler.trivial:
            return
        for param in self._held.own:
            param.grad = None
        self._restore()

    @torch.no_grad()
    def fill_masters(self, *, again: bool = True) -> None:
        """Gives masters the model's gradients, still multiplied; does nothing unless `native`.

        DistributedDataParallel writes its results after the hooks of the parameters have run, so
        gradients are accumulated and averaged over workers only by now. Without `again`, masters
        that have been given all of them since the last step keep what they have.
        """
        if not self.native or (self._filled and not again and not self._held.is_stale()):
            return
        self._filled = self._held.replace_gradients(_UNSCALED)

    def catch_up(self) -> None:
        """Gives masters what a step would give them, for wrappers that look at them before it."""
        self.fill_masters(again=False)
        self._held.follow()

    def _restore(self) -> None:
        """Puts back gradients that were set aside and met no new ones."""
        for param in self._held.own:
            before = self._stash.pop(id(param), None)
            if before is not None:
                param.grad = before
        self._stash.clear()

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if closure is not None and (self._held.masters or self.scales):
            raise RuntimeError(
                "step() was given a closure, expected none: mixed precision cannot run one. Call "
                "backward under scale_loss, then step()"
            )
        if self._pending is not None:
            raise RuntimeError(
                "step() was called while gradients are still multiplied by the loss scale: leave "
                "out delay_unscale in the last scale_loss before step(), or call zero_grad() if "
                "that has raised"
            )
        if not self.skip:
            self._refuse_unscaled()
        casting.stepping = True  # functions that the step uses compute in float32
        if self.skip:
            targets = [param for group in self.optimizer.param_groups for param in group["params"]]
            self._hidden = [(param, param.grad) for param in targets if param.grad is not None]
            for param, _grad in self._hidden:
                param.grad = None
            return None
        self.fill_masters(again=False)
        self._held.follow()
        if closure is None:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": with_casts(closure)}
        return (args[0], with_casts(closure), *args[2:]), kwargs

    def _refuse_unscaled(self) -> None:
        """Raises RuntimeError if the model has gradients that masters are never given."""
        if self.native:
            return
        is_new = not self._begun and any(param.grad is not None for param in self._held.params)
        if is_new or self._held.has_unexpected():
            raise RuntimeError(
                "step() was called with gradients that no scale_loss() has made, expected none but "
                "its own: the masters get none from loss.backward() alone. Call backward on what "
                "`with thalweg.amp.scale_loss(loss, optimizer) as scaled_loss` yields. Others are "
                "to be cleared by model.zero_grad(), or computed by torch.autograd.grad"
            )

    @torch.no_grad()
    def _after_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        casting.stepping = False
        if self.skip:
            take_stored(self.optimizer)  # there was nothing to store
            for param, grad in self._hidden:
                param.grad = grad
            self._hidden = []
            drop_norm(self.optimizer)
            for master in self._held.masters:
                master.drop_grad()
        else:
            self._held.publish()
            for master in self._held.masters:
                master.finish_step()
        self.skip = self._filled = False


def mixed_optimizer_of(optimizer: object) -> MixedOptimizer | None:
    """Returns what `initialize`, `init` or a decoration has added to an optimizer, or None."""
    found: MixedOptimizer | None = getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)
    return found


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the parameters that `optimizer.step()` updates, with gradients to be clipped.

    Yields:
        float32 masters of half-precision parameters, other parameters as they are, in the order of
        `param_groups`. Under GradScaler, gradients are divided by its scale after `unscale_`.
    """
    mixed = mixed_optimizer_of(optimizer)
    if mixed is not None:
        mixed.fill_masters(again=False)
    for group in optimizer.param_groups:
        yield from group["params"]
