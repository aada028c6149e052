"""The optimizer where the gradients meet: aggregators keep the weights and the optimizer's state.

    optimizer = thalweg.ps.ServerOptimizer(model.parameters(), "adamw", lr=1e-3)
    loss.backward()   # each gradient is pushed as soon as it is there
    optimizer.step()  # the new weights are here

docs/parameter-server.md says when that helps.
"""

from __future__ import annotations

from thalweg.ps._optimizer import ServerOptimizer

__all__ = ["ServerOptimizer"]
