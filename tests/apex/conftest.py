"""Adds the option `--apex PATH`: a work tree of NVIDIA/apex whose tests are run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--apex", help="a work tree of NVIDIA/apex, at the last commit with apex/amp")
