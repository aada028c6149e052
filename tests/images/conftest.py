"""Gives these tests a network of containers."""

import engine
import pytest


@pytest.fixture
def network():
    with engine.network() as name:
        yield name
