"""Names of systems that Thalweg takes over from, where their scripts look for them.

Importing this package, or THALWEG_COMPAT=1, or any AIAK_… switch, gives `torch.cuda.amp`
`aiak_amp_decorate` and `aiak_amp_parameters`, and `torch.optim` `LAMB`. What is there already is
left as it is. `thalweg.compat.apex` does the same for apex, when asked.
"""

# First: its import may activate this package, which needs the module below whole.
import torch  # noqa: F401

from thalweg.compat._names import install

install()

__all__ = ["install"]
