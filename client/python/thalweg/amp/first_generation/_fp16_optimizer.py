"""FP16_Optimizer: masters and loss scaling around any optimizer of a half-precision network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.amp._masters import Master, MasterSet
from thalweg.amp._scaling import LossScaler, unscale
from thalweg.amp.first_generation._fp16_scalers import DynamicLossScaler, StaticLossScaler


class FP16_Optimizer:
    """Makes `init_optimizer` update float32 masters of its half-precision parameters.

    Use `optimizer.backward(loss)` in the place of `loss.backward()`. In `param_groups`, masters are
    in the places of their parameters.

    Args:
        init_optimizer: any optimizer; it updates float32 parameters as before.
        static_loss_scale: factor of losses, unless `dynamic_loss_scale`.
        dynamic_loss_scale: find the factor with a DynamicLossScaler.
        dynamic_loss_args: keyword arguments for it.
        verbose: print overflows.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self.dynamic_loss_scale = dynamic_loss_scale
        self._divided = False  # whether gradients of float32 parameters are no longer multiplied
        self.loss_scaler: StaticLossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else StaticLossScaler(static_loss_scale)
        )
        # No other optimizer has these masters: the networks of this interface have none.
        self._held = MasterSet(init_optimizer, lambda param: Master(param, param.detach()))

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = float(value)

    @property
    def state(self) -> Any:  # noqa: ANN401
        """The optimizer's state, by master."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with masters."""
        return self.optimizer.param_groups

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clears gradients of masters and model."""
        for param in [*self._held.params, *self._targets()]:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        self._divided = False

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward of the scaled loss; gradients accumulate in the model.

        If it raises, masters keep the gradients that they have, and float32 parameters also what it
        has added, as in torch.

        Args:
            loss: a scalar of any floating point type.
            update_master_grads: also give masters the gradients so far; otherwise call
                `update_master_grads()` after the last loss.
            retain_graph: passed to `Tensor.backward`.
        """
        divide = update_master_grads or self._divided
        self._multiply_own()
        try:
            self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        except BaseException:
            if divide:
                self._divide_own()
            raise
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Gives masters the model's gradients, divided by the scale; notices overflows."""
        self._held.adopt()
        if self.dynamic_loss_scale:
            sources = [*self._held.params, *self._held.own]
            self.overflow = self.loss_scaler.has_overflow(sources)
            if self.overflow:
                return
        # A static scale: overflows have been looked for.
        self._held.replace_gradients(LossScaler(self.loss_scale))
        self._divide_own()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        """Clips gradients of masters and of other parameters.

        Returns:
            Their norm before, or -1 after an overflow.
        """
        if self.overflow:
            return -1.0
        params = list(self._targets())
        return float(torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type))

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns gradients of masters by group, or None after an overflow."""
        if self.overflow:
            return None
        return [[param.grad for param in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Updates masters and rounds them into the model; does nothing after an overflow.

        Args:
            closure: computes the loss with `optimizer.backward(loss)` in it, and returns it. It is
                called again with smaller scales as long as gradients overflow.
        """
        self._held.follow()
        if closure is not None:
            return self._step_with(closure)
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if self.verbose:
                print(f"overflow: the step is skipped, the loss scale is now {self.loss_scale}")
            return None
        result = self.optimizer.step()
        self._publish()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs: loss scale, the optimizer's state and the masters."""
        return {
            "loss_scaler": vars(self.loss_scaler).copy(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [weight.detach().clone() for weight in self._held.weights],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, and rounds masters into the model.

        The loss scaler becomes one of the saved kind.

        Raises ValueError if the masters differ in number or shape from those here.
        """
        loaded = state["fp32_from_fp16"]
        shapes = [tuple(master.shape) for master in loaded]
        expected = [tuple(weight.shape) for weight in self._held.weights]
        if shapes != expected:
            raise ValueError(
                f"the state has masters of shapes {shapes}, expected {expected}: build model and "
                "optimizer as they were when it was saved"
            )
        if self.dynamic_loss_scale != state["dynamic_loss_scale"]:
            self.dynamic_loss_scale = state["dynamic_loss_scale"]
            self.loss_scaler = (
                DynamicLossScaler() if self.dynamic_loss_scale else StaticLossScaler()
            )
        vars(self.loss_scaler).update(state["loss_scaler"])
        self.overflow = state["overflow"]
        self.first_closure_call_this_step = state["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        for weight, value in zip(self._held.weights, loaded, strict=True):
            weight.copy_(value)
        self._publish()

    def _step_with(self, closure: Callable[[], Any]) -> Any:  # noqa: ANN401
        def run() -> Any:  # noqa: ANN401
            if not self.first_closure_call_this_step:
                self._publish()  # the optimizer has moved the masters since
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                self.loss_scaler.update_scale(True)
                if self.loss_scale <= 1.0:
                    raise RuntimeError(
                        "gradients are not finite with loss scale 1, expected finite ones: the "
                        "loss or the model is not"
                    )
                loss = closure()
            return loss

        self.first_closure_call_this_step = True
        result = self.optimizer.step(run)
        self.first_closure_call_this_step = True
        self.loss_scaler.update_scale(False)
        self._publish()
        return result

    @torch.no_grad()
    def _publish(self) -> None:
        self._held.publish()

    @torch.no_grad()
    def _divide_own(self) -> None:
        """Divides gradients of float32 parameters, unless they have been divided."""
        if not self._divided:
            unscale(self._own_grads(), LossScaler(self.loss_scale))
            self._divided = True

    @torch.no_grad()
    def _multiply_own(self) -> None:
        """Multiplies gradients that have been divided, so that a backward may add to them."""
        self._held.adopt()
        if self._divided:
            unscale(self._own_grads(), LossScaler(1.0 / self.loss_scale))
            self._divided = False

    def _targets(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _own_grads(self) -> list[Tensor]:
        return [param.grad for param in self._held.own if param.grad is not None]
