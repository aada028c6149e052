"""Registers the back end "thalweg" of torch.distributed.

It runs at every `import torch`, and from torch 2.14 on where that did not register it: as an entry
point of group torch.distributed.backends.

Loads nothing until a process group is made: then `_process_group` does the work.
"""

from __future__ import annotations

from typing import Any

NAME = "thalweg"


def register() -> None:
    """Lets torch.distributed.init_process_group("thalweg") find the back end."""
    from torch.distributed import distributed_c10d as c10d

    if not hasattr(c10d, "Backend") or NAME in c10d.Backend.backend_list:
        return
    c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, pg_options: Any) -> Any:  # noqa: ANN401 - c10d's types are private
    from thalweg._c10d import _process_group

    return _process_group.create(options, pg_options)
