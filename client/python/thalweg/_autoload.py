"""Runs at every `import torch`, as an entry point of group torch.backends.

An exception here would make `import torch` fail, and every program that uses torch pays for the
time spent here. Therefore this module loads neither torch nor native code, returns at once unless a
variable of docs/zero_code.md is set, and raises nothing.
"""

import os


def activate() -> None:
    """Applies what the environment asks for: process groups, DistributedDataParallel, optimizers,
    other names.
    """
    try:
        from thalweg import _backend
        from thalweg._settings import _variables

        os.environ.update(_variables.absolute_folders())
        _variables.warn_of_unknown()
        _variables.warn_of_unused()
        _backend.register()
        if _variables.process_groups_are_watched():
            from thalweg._c10d import _default_group

            _default_group.activate()
        if _variables.activation_is_wanted(switches=["THALWEG_PS_MODE"]):
            from thalweg._activation import _local_updates

            _local_updates.activate()
        elif _variables.activation_is_wanted(switches=["THALWEG_PS"]):
            from thalweg._activation import _served

            _served.activate()
        elif _variables.activation_is_wanted():
            from thalweg._activation import _zero_code

            _zero_code.activate()
        if _variables.activation_is_wanted(switches=["THALWEG_FUSED_OPTIMIZER"]):
            from thalweg._activation import _fused_optimizers

            _fused_optimizers.activate()
        names, apex = _variables.compat_is_wanted()
        if names:
            from thalweg import compat  # noqa: F401 - importing it is all
        if apex:
            from thalweg.compat.apex import install

            install()
    except Exception as error:  # noqa: BLE001 - torch must be usable whatever is wrong with Thalweg
        import logging

        logging.getLogger("thalweg").warning(
            "thalweg: cannot be activated, or not completely: %s: %s",
            type(error).__name__,
            error,
        )
