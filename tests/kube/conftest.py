"""Lets these tests use the end-to-end tests' certificates, and what tests of images share."""

import sys
from pathlib import Path

for name in ("e2e", "images"):
    sys.path.append(str(Path(__file__).parents[1] / name))
