"""Optimizers whose groups stay as they were made."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class FixedGroups(Optimizer):
    """An optimizer that takes no further groups, because what shards keep is fixed."""

    _is_complete = True  # torch adds the groups with which an optimizer is made one by one

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:  # noqa: ANN401 - torch's
        self._is_complete = False
        super().__init__(params, defaults)
        self._is_complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: what the shards keep is fixed."""
        if self._is_complete:
            raise RuntimeError(f"thalweg: {type(self).__name__} cannot add groups: make a new one")
        super().add_param_group(param_group)
