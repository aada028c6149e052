"""What every test here begins and ends with."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For certificates.py.
sys.path.append(str(Path(__file__).parents[3] / "tests" / "e2e"))


@pytest.fixture(autouse=True)
def no_decorations_are_left() -> Iterator[None]:
    """GradScalers follow aiak_amp_decorate() for as long as an optimizer lives.

    One in a cycle lives until the garbage is collected, and would have a say in other tests.
    """
    yield
    decorations = sys.modules.get("thalweg.amp._gradscaler")
    if decorations is not None:
        decorations._decorated.clear()
