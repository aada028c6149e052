"""Offers the names of systems that Thalweg replaces, where their scripts look for them.

Importing this package, or THALWEG_COMPAT=1, or any AIAK_… switch, gives `torch.cuda.amp`
`aiak_amp_decorate` and `aiak_amp_parameters`, and `torch.optim` `LAMB`. Existing names are
unchanged. `thalweg.compat.apex` does the same for apex, when requested.
"""

# torch comes first: its import may activate this package, which needs the complete module below.
import torch  # noqa: F401

from thalweg.compat._names import install

install()

__all__ = ["install"]
