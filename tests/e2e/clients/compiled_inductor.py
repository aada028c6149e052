"""Trains with torch.compile of the wrapped module and its code generator, Inductor."""

import torch
from compiled import run

if __name__ == "__main__":
    run(outside=torch.compile(backend="inductor"))
