"""Thalweg: gradient aggregation for data-parallel PyTorch training.

    import thalweg.ddp
    state = thalweg.ddp.attach(ddp_model, thalweg.PowerSGD(rank=4))

Importing `thalweg` itself loads neither torch nor native code. It is part of every `import torch`
(thalweg/_autoload.py), hence loads nothing at all until it is asked for: `thalweg.ddp` is imported
when the attribute is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thalweg import amp as amp
    from thalweg import compat as compat
    from thalweg import data as data
    from thalweg import ddp as ddp
    from thalweg import fsdp as fsdp
    from thalweg import optim as optim
    from thalweg import policy as policy
    from thalweg import ps as ps
    from thalweg._reduce_by_hand import all_reduce, fetch_gradients
    from thalweg.codecs import BF16, FP16, FP32, Auto, Int8, OneBit, PowerSGD, TopK
    from thalweg.policy import Policy, Rule

    __version__: str

_CODECS = ("BF16", "FP16", "FP32", "Auto", "Int8", "OneBit", "PowerSGD", "TopK")
_POLICIES = ("Policy", "Rule")
_BY_HAND = ("all_reduce", "fetch_gradients")
_MODULES = ("amp", "compat", "data", "ddp", "fsdp", "optim", "policy", "ps")

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "Auto",
    "Int8",
    "OneBit",
    "Policy",
    "PowerSGD",
    "Rule",
    "TopK",
    "__version__",
    "all_reduce",
    "fetch_gradients",
]


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = _version()
    elif name in _CODECS:
        from thalweg import codecs

        value = getattr(codecs, name)
    elif name in _POLICIES:
        from thalweg import policy

        value = getattr(policy, name)
    elif name in _BY_HAND:
        from thalweg import _reduce_by_hand

        value = getattr(_reduce_by_hand, name)
    elif name in _MODULES:
        from importlib import import_module

        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("thalweg")
    except PackageNotFoundError:  # imported from a source tree that was never installed
        return "0+unknown"
