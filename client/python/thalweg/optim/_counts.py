"""Counts of optimizer steps since the process began."""

from __future__ import annotations

import collections

# Steps of torch's own optimizers that ran fused, by class.
fused_steps: collections.Counter[str] = collections.Counter()
# Steps that could not, by reason.
fallbacks: collections.Counter[str] = collections.Counter()
