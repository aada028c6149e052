"""Says when gradients are the mean over fewer workers, because nodes were lost, and which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

_log = logging.getLogger("thalweg")


class LostWorkers:
    """Looks before each step of an optimizer over how many workers the gradients are the mean."""

    def __init__(
        self, job: str, workers: int, count: Callable[[], int], nodes: Callable[[], list[str]]
    ) -> None:
        """`count` says over how many the last gradients are the mean (0: there are none yet),
        `nodes` which were lost, somewhat later.
        """
        self._job, self._all, self._count, self._nodes = job, workers, count, nodes
        self._left = workers
        self._named = 0  # nodes that the log has named
        self._listeners: list[Callable[[int], None]] = []

        def look(*_: Any) -> None:  # noqa: ANN401 - the optimizer and its arguments
            self._look()

        self._handle = register_optimizer_step_pre_hook(_disable_dynamo(look))

    def tell(self, listener: Callable[[int], None]) -> None:
        """Calls `listener` with the number of workers that are left when there are fewer."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._handle.remove()

    def _look(self) -> None:
        if self._left < self._all:
            nodes = self._nodes()
            for node in nodes[self._named :]:
                _log.warning("job %s: goes on without %s", self._job, node)
            self._named = len(nodes)
        left = self._count()
        if not 0 < left < self._left:
            return
        self._left = left
        text = "job %s: gradients are means over %d of %d workers from now on: nodes were lost"
        _log.warning(text, self._job, left, self._all)
        for listener in self._listeners:
            listener(left)
