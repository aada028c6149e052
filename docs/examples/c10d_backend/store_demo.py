"""Registers the back end "store_demo"; an entry point of setup.py calls it at `import torch`."""

from typing import Any


def register() -> None:
    """Lets init_process_group("store_demo") find the back end."""
    from torch.distributed import distributed_c10d as c10d

    c10d.Backend.register_backend("store_demo", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pg_options: object) -> Any:  # noqa: ANN401 - c10d's types are private
    """Makes the back end of one group; loads the native part not before that."""
    import _store_demo

    if pg_options is not None:
        raise RuntimeError("store_demo takes no pg_options")
    return _store_demo.StoreBackend(
        options.store, options.group_rank, options.group_size, options.timeout.total_seconds()
    )
