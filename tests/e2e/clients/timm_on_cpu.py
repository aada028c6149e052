"""Runs timm's train.py on the CPU: `timm_on_cpu.py TRAIN.PY ARGUMENTS`.

The script gives DistributedDataParallel its device, which torch refuses on the CPU. And the process
group outlives the module here: when both end together after a last all-reduce, torch's Gloo waits
for a thread that waits for Python, also without Thalweg.
"""

import runpy
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_init = DistributedDataParallel.__init__
_groups = []


def without_devices(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_ids", None)
    _init(self, *args, **kwargs)
    _groups.append(self.process_group)


if __name__ == "__main__":
    DistributedDataParallel.__init__ = without_devices
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
