"""Trains on Fashion-MNIST as an example does: `fashion_jobs.py EXAMPLE OUT`, arguments in ARGS."""

import importlib
import os
import sys


def main() -> None:
    name, out = sys.argv[1:]
    example = importlib.import_module(f"thalweg.examples.{name}")
    sys.exit(example.main([*os.environ["ARGS"].split(), "--out", out]))


if __name__ == "__main__":
    main()
