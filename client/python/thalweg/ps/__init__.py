"""The optimizer where the gradients meet: aggregators keep the weights and the optimizer's state.

    optimizer = thalweg.ps.ServerOptimizer(model.parameters(), "adamw", lr=1e-3)
    loss.backward()   # each gradient is pushed as soon as it is there
    optimizer.step()  # the new weights are here

Or every worker has its own, and they exchange what it has changed, now and then:

    optimizer = thalweg.ps.LocalOptimizer(torch.optim.AdamW(model.parameters()), every=50)

docs/parameter-server.md says when that helps.
"""

from __future__ import annotations

from thalweg.codecs import Signs, Sparse
from thalweg.ps._local import LocalOptimizer
from thalweg.ps._optimizer import ServerOptimizer
from thalweg.ps._rolling_back import RolledBack

__all__ = ["LocalOptimizer", "RolledBack", "ServerOptimizer", "Signs", "Sparse"]
