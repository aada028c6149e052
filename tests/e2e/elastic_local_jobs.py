"""Contains an elastic training with local updates, which writes what elastic_jobs.py does: LOG gets
a line for each step with its samples, and one for each exchange with the weights' digest. With a
QUORUM exchanges wait for so many nodes.
"""

import os
import sys
from pathlib import Path

import elastic_jobs
import torch
import torch.distributed as dist
from digests import digest
from elastic_jobs import RATE, SAMPLES, Log, inputs, loss_of, steps_of, weights_of

import thalweg.elastic
from thalweg.ps import LocalOptimizer

EVERY = 4
OUTER = {"name": "nesterov", "lr": 0.5, "momentum": 0.5}


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model, and an optimizer that carries nothing from step to step."""
    model, _ = elastic_jobs.make()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def ends(*, together: bool) -> bool:
    """Returns whether this worker ends now: all do after the same exchange if they are together."""
    is_over = torch.tensor(float(Path(os.environ["UNTIL"]).exists()))
    if together:
        dist.broadcast(is_over, 0)
    return bool(is_over)


def main() -> None:
    elastic_jobs.wait_for_slow_answers()
    log = Log(sys.argv[1])
    torch.set_num_threads(1)
    model, inner = make()
    data = inputs()
    sampler = thalweg.elastic.Sampler(range(SAMPLES), seed=1)
    state = thalweg.elastic.State(model=model, sampler=sampler, epoch=0, local=None)
    state.on_change(lambda membership: log.write(membership=membership, commits=state.commits))
    quorum = int(os.environ.get("QUORUM", "0")) or None
    codec = os.environ.get("CODEC")

    @thalweg.elastic.run(backend="gloo" if quorum else "thalweg")
    def train(state: thalweg.elastic.State) -> list[float]:
        optimizer = LocalOptimizer(
            inner, every=EVERY, outer=OUTER, codec=codec, quorum=quorum, min_nodes=quorum
        )
        if state.local is not None:
            optimizer.load_state_dict(state.local)
        for count, (step, part) in enumerate(steps_of(state, sampler, log), 1):
            optimizer.zero_grad()
            loss_of(model, data[part]).backward()
            optimizer.step()
            sampler.took(len(part))
            if count % EVERY:
                continue
            log.write(**step, digest=digest(model))
            state.local = optimizer.state_dict()
            state.commit()
            if ends(together=not quorum):
                optimizer.finish()
                optimizer.close()
                return weights_of(model).tolist()
        raise AssertionError("steps do not end")

    log.write(result=train(state))


if __name__ == "__main__":
    main()
