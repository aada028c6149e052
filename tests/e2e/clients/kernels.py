"""Starts kernels of notebooks."""

from jupyter_client.manager import AsyncKernelManager

from thalweg._job._addresses import free_port

_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


class Kernels(AsyncKernelManager):
    """Gives kernels ports that the system gives to nobody else: those that Jupyter chooses may be
    taken before the kernel binds them.
    """

    def __init__(self, **options: object) -> None:
        ports = {name: free_port() for name in _PORTS}
        super().__init__(cache_ports=False, **ports, **options)
