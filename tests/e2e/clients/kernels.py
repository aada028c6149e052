"""Starts kernels of notebooks."""

import sys
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager

sys.path.append(str(Path(__file__).parents[1]))

from ports import free_port

_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


class Kernels(AsyncKernelManager):
    """Gives kernels ports that nobody else is given: those that Jupyter chooses may be taken before
    the kernel binds them.
    """

    def __init__(self, **options: object) -> None:
        ports = {name: free_port() for name in _PORTS}
        super().__init__(cache_ports=False, **ports, **options)
