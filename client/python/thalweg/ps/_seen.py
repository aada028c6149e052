"""Whether other code has changed parameters since they were put in place."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.ps._parameters import Parameter


class Seen:
    """What parameters were like when they were last what they are to be."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self.remember()

    def remember(self) -> None:
        """They are what they are to be."""
        self._versions = [each.tensor._version for each in self._parameters]

    def changed(self) -> list[str]:
        """Returns the names of those that have been changed since, as far as torch counts."""
        return [
            each.name
            for each, version in zip(self._parameters, self._versions, strict=True)
            if each.tensor._version != version
        ]

    def note_memory(self) -> None:
        """New values will be written to the memory where they are now."""
        self._memory = [each.tensor.data_ptr() for each in self._parameters]

    def overtaken(self) -> list[str]:
        """Returns the names of those that these values would take the place of something in: they
        have been changed, or have got other memory, as an assignment to `data` gives them.
        """
        moved = {
            each.name
            for each, memory in zip(self._parameters, self._memory, strict=True)
            if each.tensor.data_ptr() != memory
        }
        changed = moved.union(self.changed())
        return [each.name for each in self._parameters if each.name in changed]
