"""Trains with torch.compile: of the wrapped module, and for the checkpoint of the module inside.

See common.py.
"""

import functools
from typing import Any

import plain_loop
import torch
from common import Task, main

BACKEND = "aot_eager"  # all of the compiler but its code generator, which takes half a minute


def train(task: Task, backend: str = BACKEND) -> dict[str, Any]:
    compiled = functools.partial(torch.compile, backend=backend)
    if task.saves or task.resumes:
        return plain_loop.train(task, inside=compiled)
    return plain_loop.train(task, outside=compiled)


if __name__ == "__main__":
    main(train)
