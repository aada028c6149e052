"""Contains an elastic training with local updates, which writes what elastic_jobs.py does: LOG gets
a line for each step with its samples, and one for each exchange with the weights' digest.
"""

import os
import sys
from pathlib import Path

import elastic_jobs
import torch
import torch.distributed as dist
from digests import digest
from elastic_jobs import BATCH, RATE, SAMPLES, Log, inputs, loss_of, weights_of

import thalweg.elastic
from thalweg.ps import LocalOptimizer

EVERY = 4
OUTER = {"name": "nesterov", "lr": 0.5, "momentum": 0.5}


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model, and an optimizer that carries nothing from step to step."""
    model, _ = elastic_jobs.make()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def main() -> None:
    log = Log(sys.argv[1])
    torch.set_num_threads(1)
    model, inner = make()
    data = inputs()
    sampler = thalweg.elastic.Sampler(range(SAMPLES), seed=1)
    state = thalweg.elastic.State(model=model, sampler=sampler, epoch=0, local=None)
    state.on_change(lambda membership: log.write(membership=membership, commits=state.commits))
    is_over = torch.zeros(1)

    @thalweg.elastic.run
    def train(state: thalweg.elastic.State) -> list[float]:
        optimizer = LocalOptimizer(inner, every=EVERY, outer=OUTER, codec=os.environ.get("CODEC"))
        if state.local is not None:
            optimizer.load_state_dict(state.local)
        steps = 0
        while True:
            sampler.set_epoch(state.epoch)
            indices = list(sampler)
            for at in range(0, len(indices), BATCH):
                part = indices[at : at + BATCH]
                step = {"step": state.commits + 1, "generation": state.membership.generation}
                log.write(**step, samples=part)
                optimizer.zero_grad()
                loss_of(model, data[part]).backward()
                optimizer.step()
                sampler.took(len(part))
                steps += 1
                if steps % EVERY:
                    continue
                log.write(**step, digest=digest(model))
                state.local = optimizer.state_dict()
                state.commit()
                is_over.fill_(Path(os.environ["UNTIL"]).exists())
                dist.broadcast(is_over, 0)
                if is_over:
                    optimizer.close()
                    return weights_of(model).tolist()
            state.epoch += 1

    log.write(result=train(state))


if __name__ == "__main__":
    main()
