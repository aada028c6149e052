"""Notices gradients that backward passes outside of scale_loss() leave in the model.

Masters are never given these, so a step would leave them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter


class _Contexts:
    """How many contexts of scale_loss() are open in this process."""

    open = 0


@contextmanager
def expect_gradients() -> Iterator[None]:
    """Within the context, gradients are those of a loss that scale_loss() has multiplied."""
    _Contexts.open += 1
    try:
        yield
    finally:
        _Contexts.open -= 1


class Watch:
    """Whether a parameter has gradients of backward passes outside of `expect_gradients`.

    The parameter is passed to each method, because a reference to it from here would keep it alive.
    """

    __slots__ = ("_is_set", "_seen")

    def __init__(self) -> None:
        self._is_set = False
        self._seen = False

    def begin(self, param: Parameter) -> None:
        """Forgets what was noticed, and looks at all gradients from now on."""
        self._seen = False
        if not self._is_set and param.requires_grad:
            param.register_post_accumulate_grad_hook(self._look)
            self._is_set = True

    def forget(self) -> None:
        """Forgets what was noticed: the gradients are cleared."""
        self._seen = False

    def has_unexpected(self, param: Parameter) -> bool:
        """Returns whether such gradients are there and not all zero.

        They may have been cleared in the model. This waits for the device if there have been any.
        """
        return self._seen and param.grad is not None and bool(param.grad.any())

    def _look(self, _: Tensor) -> None:
        if not _Contexts.open:
            self._seen = True
