"""A strategy of Lightning that averages gradients through Thalweg.

    import pytorch_lightning, thalweg.lightning

    strategy = thalweg.lightning.ThalwegStrategy("powersgd:rank=4,start=100")
    trainer = pytorch_lightning.Trainer(strategy=strategy, …)  # "thalweg": without a codec
    trainer.fit(model)
    print(strategy.state.summary())

It derives from the DDPStrategy of pytorch_lightning, or of lightning.pytorch where that one is
imported already or is the only one.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

    from thalweg._attach._state import State
    from thalweg.codecs import Codec
    from thalweg.policy import Policy
elif "lightning.pytorch" in sys.modules or importlib.util.find_spec("pytorch_lightning") is None:
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
else:
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

_NAME = "thalweg"
# Arguments of DDPStrategy that replace the average of gradients.
_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class ThalwegStrategy(DDPStrategy):
    """Is Lightning's DDPStrategy whose module thalweg.ddp.attach() has attached, also on CPUs.

    `codec` is that of attach(): one of thalweg.codecs, a Policy, the text of either, or None for
    that of the environment, as are all other settings. `arguments` are those of DDPStrategy.
    fit() raises what attach() raises. Checkpoints of Lightning take the codec's step counts and
    factors along, as optimizers' do everywhere.

    Raises ValueError for arguments of DDPStrategy that would average gradients differently.
    """

    def __init__(
        self,
        codec: Codec | Policy | str | None = None,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        refused = [name for name in _HOOKS if arguments.get(name) is not None]
        if refused:
            raise ValueError(
                f"thalweg: ThalwegStrategy got {', '.join(refused)}, but averages gradients by "
                "itself: use DDPStrategy for a hook of your own"
            )
        super().__init__(**arguments)
        self._codec = codec
        self._state: State | None = None

    @property
    def state(self) -> State:
        """Returns what attach() has returned in the latest fit(); RuntimeError before that."""
        if self._state is None:
            raise RuntimeError("thalweg: fit() has not wrapped a module yet, so none is attached")
        return self._state

    def configure_ddp(self) -> None:
        """Wraps the module, as Lightning asks for, and attaches it."""
        super().configure_ddp()
        if not isinstance(self.model, DistributedDataParallel):
            raise TypeError(
                f"thalweg: Lightning has made a {type(self.model).__name__}, expected "
                "DistributedDataParallel"
            )
        self._state = ddp.attach(self.model, self._codec)


StrategyRegistry.register(
    _NAME, ThalwegStrategy, description="DDP whose gradients are averaged through Thalweg"
)
