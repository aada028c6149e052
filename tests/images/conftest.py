"""Gives these tests a network of containers, and what they share with tests of clusters."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kube"))

import engine


@pytest.fixture
def network():
    with engine.network() as name:
        yield name
