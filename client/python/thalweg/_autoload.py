"""What every `import torch` runs: the entry point of group torch.backends.

An exception here would make `import torch` fail, and time spent here is spent by every program that
uses torch. So this loads neither torch nor native code, returns at once unless a variable of
docs/zero_code.md is set, and raises nothing.
"""


def activate() -> None:
    """Has DistributedDataParallel ask the environment, if anything there is for it."""
    try:
        from thalweg import _config

        if _config.activation_is_wanted():
            from thalweg import _zero_code

            _zero_code.activate()
    except Exception as error:  # noqa: BLE001 - torch must be usable whatever is wrong with Thalweg
        import logging

        logging.getLogger("thalweg").warning(
            "thalweg: cannot be activated, DistributedDataParallel stays as it is: %s: %s",
            type(error).__name__,
            error,
        )
