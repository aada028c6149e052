"""Training that goes on without lost nodes, and takes them in again when they are back.

    state = thalweg.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @thalweg.elastic.run
    def train(state):
        ddp_model = DistributedDataParallel(state.model)  # of the members as they are now
        for state.epoch in range(state.epoch, 10):
            for inputs, targets in batches(state.sampler):
                ...  # a step
                state.commit()

    train(state)

`train` is called again whenever nodes have been lost or have come, on all workers, with the state
of the last commit. THALWEG_ELASTIC names the nodes, each of which starts its own workers.
docs/elastic.md has a whole script, and says what starts nodes again.
"""

from __future__ import annotations

from thalweg.elastic._membership import Membership
from thalweg.elastic._run import run
from thalweg.elastic._sampler import Sampler
from thalweg.elastic._state import State

__all__ = ["Membership", "Sampler", "State", "run"]
