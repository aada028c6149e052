"""Runs a script that was written for apex and a GPU, on the shim and the CPU.

THALWEG_COMPAT=apex python tests/apex/run_script.py SCRIPT [ARGUMENT…]
"""

import runpy
import sys
from pathlib import Path

import cuda_on_cpu  # noqa: F401 - puts the mapping in place

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
