"""What every test here begins and ends with."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_decorations_are_left() -> Iterator[None]:
    """GradScalers follow aiak_amp_decorate() for as long as an optimizer lives.

    One in a cycle lives until the garbage is collected, and would have a say in other tests.
    """
    yield
    decorations = sys.modules.get("thalweg.amp._gradscaler")
    if decorations is not None:
        decorations._decorated.clear()
