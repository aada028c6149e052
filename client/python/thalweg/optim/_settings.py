"""Settings of an optimizer that belong to no group: what zero_grad() does, and copies keep them."""

from __future__ import annotations

from typing import Any


class SettingsMixin:
    """Put before a torch optimizer: has the argument `set_grad_none`, and keeps `_settings`.

    `_settings` names the attributes that copies and pickles contain: torch omits what it does not
    know.
    """

    _settings: tuple[str, ...] = ("_set_grad_none",)
    _set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients; with `set_to_none` None it does what `set_grad_none` says."""
        super().zero_grad(  # type: ignore[misc]
            self._set_grad_none if set_to_none is None else set_to_none
        )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {**state, **{name: getattr(self, name) for name in self._settings}}
