"""Trains with torch.compile of the wrapped module; see compiled.py."""

import torch
from compiled import run

if __name__ == "__main__":
    run(outside=torch.compile(backend="aot_eager"))
