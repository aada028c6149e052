"""What `initialize` and `init` have set up in this process."""

from __future__ import annotations

import logging

from thalweg.amp._options import Options
from thalweg.amp._scaler import LossScaler


class State:
    """apex keeps the same in a module `_amp_state`; scripts look into it for `loss_scalers`."""

    def __init__(self) -> None:
        self.options: Options | None = None  # None: initialize() has not been called
        self.loss_scalers: list[LossScaler] = []
        self.handle: object = None  # the AmpHandle of the patched functions, with O1 and init()
        self.verbosity = 1

    @property
    def trivial(self) -> bool:
        """Whether initialize() has been called, and losses and gradients are not scaled."""
        return self.options is not None and all(scaler.trivial for scaler in self.loss_scalers)

    def say(self, text: str, level: int = 1) -> None:
        """One line for the user, unless the verbosity is below `level`."""
        if self.verbosity >= level:
            logging.getLogger("thalweg.amp").info("%s", text)


state = State()
