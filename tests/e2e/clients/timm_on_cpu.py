"""Runs timm's train.py on the CPU: `timm_on_cpu.py TRAIN.PY ARGUMENTS`.

The script gives DistributedDataParallel its device, which torch refuses on the CPU. And the module,
with its process group, outlives the script here: when both end together after a last all-reduce,
torch's Gloo waits for a thread that waits for Python, also without Thalweg.

Every worker writes what it has seen to seen<rank>.json. With DIES_AFTER=STEPS, rank 1 dies in the
step that follows so many, once; with RESUMES_FROM=FILE, the script resumes from a file that exists.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from common import die_after_a_step, seen
from torch.nn.parallel import DistributedDataParallel

_init = DistributedDataParallel.__init__
_modules: list[DistributedDataParallel] = []
RANK = int(os.environ["RANK"])


def without_devices(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_ids", None)
    _init(self, *args, **kwargs)
    _modules.append(self)


if __name__ == "__main__":
    DistributedDataParallel.__init__ = without_devices
    del sys.argv[0]
    note = Path("died")
    if "DIES_AFTER" in os.environ and RANK == 1 and not note.exists():
        die_after_a_step(note, later=int(os.environ["DIES_AFTER"]))
    if Path(saved := os.environ.get("RESUMES_FROM", "")).is_file():
        sys.argv += ["--resume", saved]
    runpy.run_path(sys.argv[0], run_name="__main__")
    [module] = _modules
    Path(f"seen{RANK}.json").write_text(json.dumps(seen(module)), encoding="utf-8")
