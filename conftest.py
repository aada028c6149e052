"""Leaves out the tests whose turn comes after TESTS_UNTIL, in seconds since 1970."""

import os
import time

import pytest

_UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skips the test before its fixtures begin, and says why."""
    if time.time() > _UNTIL:
        pytest.skip("no time was left for it on this machine")
