"""The module `apex`, for scripts that import it: mixed precision, its optimizers, its DDP helper.

    import thalweg.compat.apex
    thalweg.compat.apex.install()       # or THALWEG_COMPAT=apex in the environment
    from apex import amp                # now thalweg.amp

An apex that is installed is never hidden, unless that is asked for.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType

from thalweg import amp
from thalweg.amp import fp16_utils
from thalweg.compat import _apex_optimizers, _apex_parallel

_PARTS = {
    "amp": amp,
    "fp16_utils": fp16_utils,
    "optimizers": _apex_optimizers,
    "parallel": _apex_parallel,
}


def install(*, replace: bool = False) -> bool:
    """Makes `import apex` find thalweg.amp; may be called again.

    Args:
        replace: hide an apex that is installed or has been imported.

    Returns:
        Whether `apex` is ours; False, with a warning, if there is another one.
    """
    present = sys.modules.get("apex")
    if getattr(present, "__thalweg__", False):
        return True
    if not replace and (present is not None or importlib.util.find_spec("apex") is not None):
        logging.getLogger("thalweg").warning(
            "apex is installed and stays what it is: remove it, or call "
            "thalweg.compat.apex.install(replace=True)"
        )
        return False
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    package = ModuleType("apex", __doc__)
    package.__dict__.update(_PARTS, __thalweg__=True, __path__=[])
    sys.modules["apex"] = package
    for name, module in _PARTS.items():
        sys.modules[f"apex.{name}"] = module
    return True
