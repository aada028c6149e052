"""Contains a job whose steps and gradients are counted: `counted_steps_jobs.py counted OUT`."""

import os

import job_runner
from server_optimizer_trainers import on_servers


def counted() -> dict[str, int]:
    """Trains for STEPS steps, and returns how many bytes of gradients there are in each."""
    ours = on_servers(os.environ["OPTIMIZER"])
    ours.train(int(os.environ["STEPS"]))
    return {"bytes": sum(p.nbytes for p in ours.model.parameters() if p.requires_grad)}


if __name__ == "__main__":
    job_runner.run(lambda name: {"counted": counted}[name]())
