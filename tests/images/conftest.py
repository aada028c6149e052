"""Lets these tests use what the end-to-end tests share, and gives them a network of containers."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import engine


@pytest.fixture
def network():
    with engine.network() as name:
        yield name
