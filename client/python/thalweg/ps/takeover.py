"""Makes a ServerOptimizer of an optimizer that a script has, or lets one do local updates."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch.distributed as dist
from torch.optim import Optimizer

from thalweg._settings._arguments import JobArguments
from thalweg.ps._local import LocalOptimizer
from thalweg.ps._optimizer import ServerOptimizer
from thalweg.ps._wishes import Wishes


def take_over(
    optimizer: Optimizer,
    kind: str,
    process_group: dist.ProcessGroup,
    *,
    pull: str | None,
    overlap: bool,
    find_unused_parameters: bool,
    asked_by: str,
) -> ServerOptimizer:
    """Turns torch's own optimizer of that kind into a ServerOptimizer that goes on from its state.

    All workers call it between two steps. The object stays the same, and so do its groups, because
    schedulers and the script hold them; its class is derived from the former one. Gradients may
    carry a loss scale, and be clipped from step to step. Errors name `asked_by`. Raises what
    ServerOptimizer does.
    """
    wishes = Wishes(
        kind,
        process_group,
        JobArguments(),
        pull=pull,
        loss_scaling=True,
        overlap=overlap,
        finds_unused=find_unused_parameters,
    )
    before = type(optimizer)
    optimizer.__class__ = type(f"{before.__name__}OnShards", (ServerOptimizer, before), {})
    assert isinstance(optimizer, ServerOptimizer)
    try:
        optimizer._begin(wishes)
    except BaseException:
        optimizer.__class__ = before  # type: ignore[assignment]
        raise
    optimizer._serving.asked_by = asked_by
    optimizer._patch_step_function()  # torch's hooks of steps
    if "step" in vars(optimizer):
        _replace_step(optimizer)
    return optimizer


class Followed(LocalOptimizer):
    """The local updates of an optimizer whose step() the script calls itself, and which has done
    one that was equal on all workers.
    """

    def follow(self, other: Optimizer) -> None:
        """Goes on with another optimizer that has the same trainable parameters, before its first
        step. Steps of the former one still count, should there be any.
        """
        self.inner = other
        self._follow()
        self._hooks.append(other.register_load_state_dict_post_hook(lambda _: self._follow()))
        self._count_steps()

    def refuse(self, why: str) -> NoReturn:
        """Ends the job, and raises RuntimeError."""
        self._exchange._serving.fail(why)
        raise AssertionError

    def _guard(self) -> None:
        self._exchange._serving.asked_by = "THALWEG_PS_MODE"
        self._exchange.note_common_step()
        self._count_steps()

    def _count_steps(self) -> None:
        ref = weakref.ref(self)  # the optimizer may outlive this

        def check(optimizer: Optimizer, *_: object) -> None:
            if (ours := ref()) is not None:
                ours._exchange.check(optimizer.param_groups)

        def advance(*_: object) -> None:
            if (ours := ref()) is not None:
                ours._exchange.advance()

        self._hooks.append(self.inner.register_step_pre_hook(check))
        self._hooks.append(self.inner.register_step_post_hook(advance))


def _replace_step(optimizer: ServerOptimizer) -> None:
    """Replaces what a scheduler has put in front of the former class's step()."""
    weak = weakref.ref(optimizer)  # a scheduler does not keep it either

    def step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        ours = weak()
        assert ours is not None
        ours._opt_called = True  # type: ignore[attr-defined]
        return type(ours).step(ours, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
