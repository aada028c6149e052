"""The state that an optimizer shows its script while shards keep it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thalweg._settings import _logging
from thalweg.ps._shard_state import ShardState


class ShownState(defaultdict[Tensor, Any]):
    """Is empty as long as the shards have the state. A script that clears it then is told once that
    the shards do not hear of that. Copies are plain dictionaries.
    """

    def __init__(self, values: Mapping[Tensor, Any], shards: ShardState) -> None:
        super().__init__(dict, values)
        self._shards = shards
        self._has_said = False

    def clear(self) -> None:
        super().clear()
        if self._shards.is_published and not self._has_said:
            self._has_said = True
            _logging.say(
                logging.WARNING,
                "state.clear() has no effect on an optimizer whose state is on the shards; what "
                "resets it is load_state_dict({**state_dict(), 'state': {}}) on all workers",
            )

    def __copy__(self) -> Any:  # noqa: ANN401
        return defaultdict(dict, self)

    copy = __copy__

    # defaultdict copies itself by calling its class, which takes other arguments here.
    def __or__(self, other: Any) -> Any:  # noqa: ANN401
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:  # noqa: ANN401
        return other | self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))
