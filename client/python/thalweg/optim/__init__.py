"""Optimizers whose step is one pass over all parameters. docs/optim.md says what is fused.

`fused_steps` and `fallbacks` count the steps of torch's own optimizers where the environment has
them run fused: by class, and by reason where they could not. `fallbacks` has LAMB's as well.
"""

# First: its import may activate thalweg.compat, which needs thalweg.optim.lamb whole.
import torch  # noqa: F401

from thalweg.optim._adam import FusedAdam, FusedAdamW
from thalweg.optim._counts import fallbacks, fused_steps
from thalweg.optim._sgd import FusedSGD
from thalweg.optim.lamb import LAMB, FusedLAMB

__all__ = ["LAMB", "FusedAdam", "FusedAdamW", "FusedLAMB", "FusedSGD", "fallbacks", "fused_steps"]
