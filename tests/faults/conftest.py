"""Lets these tests use the end-to-end tests' small cluster."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
