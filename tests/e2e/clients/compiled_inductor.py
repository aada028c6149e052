"""Trains with torch.compile and its own code generator, Inductor; see compiled.py."""

import functools

from common import main
from compiled import train

if __name__ == "__main__":
    main(functools.partial(train, backend="inductor"))
