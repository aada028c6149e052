"""Trains in a process that torch.multiprocessing.spawn starts; see common.py."""

import sys

import torch
from common import main
from plain_loop import train


def child(_: int, arguments: list[str]) -> None:
    """Trains in a process that gets the node's variables from its parent."""
    sys.argv = arguments
    main(train)


if __name__ == "__main__":
    torch.multiprocessing.spawn(child, args=(sys.argv,), nprocs=1)
