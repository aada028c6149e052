"""Trains with torch.compile of the model, which DistributedDataParallel then wraps; see common.py.

The compiler does all but generate code, which takes half a minute.
"""

import functools

import plain_loop
import torch
from common import main


def run(**treatment: plain_loop.Treatment) -> None:
    """`treatment` is for plain_loop.train()."""
    main(functools.partial(plain_loop.train, **treatment))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # nothing was left as it is


if __name__ == "__main__":
    run(inside=torch.compile(backend="aot_eager"))
