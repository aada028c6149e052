"""The settings of steps, which shards know by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thalweg import _C
from thalweg.ps._parameters import Parameter
from thalweg.ps._rules import Group, Kind, settings_of


class StepSettings:
    """What has been announced in a session, the latest last."""

    def __init__(
        self, session: _C.Session, kind: Kind, parameters: Sequence[Parameter], last: int
    ) -> None:
        """Numbers follow `last`."""
        self._session = session
        self._kind = kind
        self._group_of = {each.settings: each.group for each in parameters}
        self._latest: object = None
        self.number = last  # of the latest

    def are(
        self,
        groups: Sequence[Group],
        ratios: Mapping[int, float] | None = None,
        *,
        anew: float = False,
        **of_all: float,
    ) -> bool:
        """Whether the latest settings are these, and need not be announced `anew`. `ratios` has by
        number of settings what a rate is multiplied by, if that is not 1.
        """
        return not anew and (self._by_number(groups, ratios), of_all) == self._latest

    def announce(
        self,
        groups: Sequence[Group],
        ratios: Mapping[int, float] | None = None,
        *,
        anew: float = False,
        **of_all: float,
    ) -> None:
        """Gives them the next number."""
        settings = self._by_number(groups, ratios)
        self.number += 1
        self._latest = (settings, of_all)
        self._session.set_settings(self.number, settings, **of_all)  # type: ignore[arg-type]

    def _by_number(
        self, groups: Sequence[Group], ratios: Mapping[int, float] | None
    ) -> list[dict[str, float]]:
        by_group = settings_of(self._kind, groups)
        if not self._kind.measures:
            return by_group
        return [
            by_group[group] | {"trust_ratio": ratios.get(number, 1.0) if ratios else 1.0}
            for number, group in sorted(self._group_of.items())
        ]
