"""What a worker has not sent, where its work counts otherwise from exchange to exchange."""

from __future__ import annotations

import math

from torch import Tensor


class Unsent:
    """What a worker has changed and not sent, as it counts in the mean.

    Its own weights have it divided by `divisor`, which is about what it has changed.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.divisor = 1.0

    def join(self, changes: Tensor, factor: float) -> Tensor:
        """Returns what is to be sent: what has not been sent as it counts, and what has been
        changed since times `factor`. `changes` is `factor` times both. Then `divisor` is that of
        what is left of it.
        """
        if self.values is None or factor == self.divisor:
            self.divisor = factor or self.divisor
            return changes
        whole = changes + (1 - factor / self.divisor) * self.values
        counts, changed = float(whole.norm()), float(changes.norm()) / (factor or 1)
        if counts and changed and math.isfinite(counts / changed):
            self.divisor = counts / changed
        return whole
