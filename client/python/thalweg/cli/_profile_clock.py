"""Measures the phases of training steps through torch's hooks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from thalweg.cli._script import Done

PHASES = ("data", "forward", "backward", "wait", "optimizer", "other")


class Clock:
    """Adds up the seconds of each phase, step by step.

    data: the wait for a DataLoader. forward: outermost modules, in training mode or not. backward:
    until the last gradient of a DistributedDataParallel module is there; wait: from there to the
    end of backward(), where gradients are averaged. optimizer: step(). other: everything else. A
    step ends with that of the optimizer which has stepped first. Where a GPU is used, the borders
    of phases wait for it.
    """

    def __init__(self, steps: int, skip: int, at_begin: Callable[[], None]) -> None:
        """`at_begin` is called after `skip` steps; Done is raised after `steps` more."""
        self.steps: list[dict[str, float]] = []
        self.ddp_modules: list[DistributedDataParallel] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._wanted, self._to_skip, self._at_begin = steps, skip, at_begin
        self._now = dict.fromkeys(PHASES, 0.0)
        self._depth = 0
        self._open_steps = 0  # more than 1 inside of a step() that calls its base class's
        self._began: dict[str, float] = {}
        self._last_gradient = 0.0
        self._first: object = None
        self._step_began = _time()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Measures what runs inside."""
        with contextlib.ExitStack() as stack:
            handles = [
                modules.register_module_forward_pre_hook(self._enter),
                modules.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            self._wrap(stack, dataloader._BaseDataLoaderIter, "__next__", self._data)
            self._wrap(stack, torch.autograd, "backward", self._backward)
            yield

    @staticmethod
    def _wrap(
        stack: contextlib.ExitStack,
        owner: Any,  # noqa: ANN401 - a class or a module
        name: str,
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        original = getattr(owner, name)
        setattr(owner, name, around(original))
        stack.callback(setattr, owner, name, original)

    def _data(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:  # noqa: ANN401
            with self._phase("data"):
                return load(*arguments)

        return measured

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            began = self._last_gradient = _time()
            result = original(*arguments, **options)
            # Without DistributedDataParallel nobody notes gradients, and nobody is waited for.
            noted = self._last_gradient if self.ddp_modules else _time()
            self._now["backward"] += noted - began
            self._now["wait"] += _time() - noted
            return result

        return measured

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = _time()
        try:
            yield
        finally:
            self._now[name] += _time() - began

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        if self._depth == 0:
            self._open_steps = 0  # one that has raised is not closed
            self._began["forward"] = _time()
        self._depth += 1
        if isinstance(module, DistributedDataParallel) and module not in self.ddp_modules:
            self.ddp_modules.append(module)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _leave(self, _: torch.nn.Module, __: object, ___: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._now["forward"] += _time() - self._began["forward"]

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._last_gradient = _time()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._open_steps += 1
        if self._open_steps > 1:
            return
        self._began["optimizer"] = _time()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._open_steps -= 1
        if self._open_steps > 0:
            return
        now = _time()
        self._now["optimizer"] += now - self._began["optimizer"]
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            return
        total = now - self._step_began
        self._now["other"] = max(0.0, total - sum(self._now.values()))
        if self._to_skip > 0:
            self._to_skip -= 1
            if self._to_skip == 0:
                self._at_begin()
        else:
            self.steps.append(self._now)
        if len(self.steps) >= self._wanted:
            raise Done
        self._now = dict.fromkeys(PHASES, 0.0)
        self._step_began = _time()


def _time() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
