"""How tests of attacks are marked."""

import pytest


def fails_today(observed: str) -> pytest.MarkDecorator:
    """Marks a test that the server does not pass yet, with what was observed instead."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=observed)
