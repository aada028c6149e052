"""Float32 masters of half-precision parameters.

A parameter has one master, however many optimizers update it. The master is the weight: the
parameter is its rounding, checkpoints contain the master, and the master follows whoever writes
into the parameter (a broadcast, a checkpoint, an average of weights).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from thalweg.amp._scaling import LossScaler, gather_unscaled
from thalweg.amp._watching import Watch
from thalweg.optim._copies import ask_for_copies, take_stored

HALF_TYPES = (torch.float16, torch.bfloat16)


def _count_own_references() -> int:
    """Returns what getrefcount() says of an object that only a local variable refers to.

    From Python 3.14 on it is not 2 everywhere: the argument may borrow the variable's reference.
    """
    grad = object()
    return sys.getrefcount(grad)


_OWN_REFERENCES = _count_own_references()

_masters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter


class Master:
    """The float32 `weight` of a parameter, which optimizers update and checkpoints contain.

    The parameter is passed to each method, because a reference to it from here would keep it alive.
    """

    __slots__ = ("_memory", "_source", "_used", "_version", "optimizers", "watch", "weight")

    def __init__(self, param: Parameter, weight: Tensor) -> None:
        self.weight = Parameter(
            torch.empty_like(param, dtype=torch.float32).copy_(weight),
            requires_grad=param.requires_grad,
        )
        self._version = param._version
        self._memory: Tensor | None = None  # of an earlier gradient
        self._used = False  # whether a step has used the gradient
        # The parameter's gradient that was given last, and its version.
        self._source: tuple[Tensor, int] | None = None
        self.optimizers = 0  # how many update the weight
        self.watch = Watch()

    def drop_grad(self) -> None:
        """Removes the weight's gradient; keeps its memory for the next, unless others refer to it.

        On the CPU, the system needs as long to clear new memory as a gradient takes to be made.
        """
        grad = self.weight.grad
        self.weight.grad = self._source = None
        self._used = False
        if grad is not None and grad.is_cpu and sys.getrefcount(grad) == _OWN_REFERENCES:
            self._memory = grad

    def finish_step(self) -> None:
        """Removes the gradient that a step has used; one that other optimizers use as well stays.

        It has to go before the next backward adds to it: `model.zero_grad()` does not reach it.
        """
        if self.optimizers == 1:
            self.drop_grad()
        else:
            self._used = True

    def drop_used_grad(self) -> None:
        """Removes the weight's gradient if a step has used it; any other can be added to."""
        self._source = None
        if self._used:
            self.drop_grad()

    def note_source(self, grad: Tensor | None) -> None:
        """Notes that this gradient of the parameter has just been given; None: none has."""
        self._source = None if grad is None else (grad, _version_of(grad))

    def has_source(self) -> bool:
        """Returns whether the weight has been given a gradient to which none is to be added yet."""
        return self._source is not None

    def is_cleared(self, param: Parameter) -> bool:
        """Returns whether the gradient that was given has since been cleared in the model."""
        if self._source is None:
            return False
        grad, version = self._source
        is_written = param.grad is grad and _version_of(grad) != version
        return param.grad is None or (is_written and not bool(grad.any()))

    def is_stale(self, param: Parameter) -> bool:
        """Returns whether the parameter has another gradient than that which was given."""
        if self._source is None or param.grad is None:
            return (self._source is None) != (param.grad is None)
        grad, version = self._source
        return param.grad is not grad or _version_of(grad) != version

    def take_memory(self) -> Tensor | None:
        """Returns the memory of an earlier gradient, if there is any, for the next one."""
        memory, self._memory = self._memory, None
        return memory

    def mark_equal(self, param: Tensor) -> None:
        """Notes that the parameter has just been rounded from the weight."""
        self._version = param._version

    def follow(self, param: Tensor) -> None:
        """Updates the weight if somebody else has written into the parameter since.

        An element that is still the rounding of its weight keeps the weight's precision; any other
        is taken from the parameter. Writes through `param.data` are missed: torch does not count
        them.
        """
        if self._version == param._version:
            return
        with torch.no_grad():
            kept = self.weight.to(param.dtype) == param
            self.weight.copy_(torch.where(kept, self.weight, param.float()))
        self._version = param._version


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # torch counts no writes to those


def master_of(param: Tensor) -> Master | None:
    """Returns the master of a model's parameter, or None if it has none."""
    master: Master | None = _masters.get(param)
    return master


def ensure_master(param: Parameter, weight: Tensor | None = None) -> Master:
    """Returns the master of a half-precision parameter, which is made if there is none.

    Args:
        param: a parameter of any shape, in a half type.
        weight: the float32 values that the parameter had before it was rounded; None: its values.
    """
    master = master_of(param)
    if master is None:
        master = _masters[param] = Master(param, param.detach() if weight is None else weight)
    return master


def forget_master(param: Tensor) -> None:
    """Removes the parameter's master."""
    _masters.pop(param, None)


class MasterSet:
    """The masters that one optimizer updates, in the places of their parameters.

    Attributes:
        params: half-precision parameters of the model.
        masters: their masters, in the same order.
        own: the optimizer's other parameters, which are in the model themselves.
    """

    def __init__(
        self, optimizer: Optimizer, make: Callable[[Parameter], Master] | None = ensure_master
    ) -> None:
        """`make` returns the master of a parameter; None: all parameters stay where they are."""
        self.params: list[Parameter] = []
        self.masters: list[Master] = []
        self.own: list[Parameter] = []
        self._optimizer = optimizer
        self._make = make
        self.adopt()

    @property
    def weights(self) -> list[Parameter]:
        """The float32 weights of the masters."""
        return [master.weight for master in self.masters]

    def params_by_weight(self) -> dict[int, Parameter]:
        """Returns the half-precision parameters by the id of their master's weight."""
        return dict(zip(map(id, self.weights), self.params, strict=True))

    def adopt(self) -> None:
        """Puts masters in the places of parameters that are new, with the state that these have."""
        known = {id(param) for param in [*self.own, *self.weights]}
        before = len(self.masters)
        for group in self._optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if id(param) in known:
                    continue
                if self._make is None or param.dtype not in HALF_TYPES:
                    self.own.append(param)
                    continue
                master = self._make(param)
                master.optimizers += 1
                group["params"][i] = master.weight
                if param in self._optimizer.state:
                    self._optimizer.state[master.weight] = self._optimizer.state.pop(param)
                self.params.append(param)
                self.masters.append(master)
        if len(self.masters) > before:
            ask_for_copies(self._optimizer, zip(self.weights, self.params, strict=True))

    def give_back(self) -> None:
        """Puts parameters back in the places of their masters, with the state that these have."""
        params = self.params_by_weight()
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                if id(weight) in params:
                    group["params"][i] = params[id(weight)]
                    if weight in state:
                        state[params[id(weight)]] = state.pop(weight)
        for master in self.masters:
            master.optimizers -= 1

    def pairs(self) -> Iterable[tuple[Parameter, Master]]:
        """Returns the parameters, each with its master."""
        return zip(self.params, self.masters, strict=True)

    def drop_old_gradients(self) -> None:
        """Prepares for a backward: removes gradients of the model, and of masters those that a
        step has used or that the script has cleared in the model.
        """
        given = [(param, master) for param, master in self.pairs() if master.has_source()]
        cleared = [master for param, master in given if master.is_cleared(param)]
        if cleared and len(cleared) == len(given):
            cleared = self.masters  # those as well that only an earlier backward has given one
        for master in cleared:
            master.drop_grad()
        for param, master in self.pairs():
            param.grad = None
            master.drop_used_grad()
            master.watch.begin(param)

    def is_stale(self) -> bool:
        """Returns whether the model has other gradients than those that masters were given."""
        return any(master.is_stale(param) for param, master in self.pairs())

    def has_unexpected(self) -> bool:
        """Returns whether the model has gradients that no scale_loss() has made."""
        return any(master.watch.has_unexpected(param) for param, master in self.pairs())

    def replace_gradients(self, scaler: LossScaler) -> bool:
        """Gives masters the gradients of their parameters, divided by the scale, and no others.

        Returns whether there were any.
        """
        for master in self.masters:
            master.drop_grad()
        used = [(param, master) for param, master in self.pairs() if param.grad is not None]
        give_gradients(used, scaler)
        return bool(used)

    def follow(self) -> None:
        """Updates weights whose parameters somebody else has written."""
        for param, master in self.pairs():
            master.follow(param)

    def publish(self) -> None:
        """Rounds weights into the parameters of the model, to nearest even, after a step.

        A fused step has done so already for those that have a gradient. The caller has disabled
        autograd.
        """
        targets: list[Tensor] = [*self.params]
        weights: list[Tensor] = [*self.weights]
        if take_stored(self._optimizer):
            left = [i for i, weight in enumerate(weights) if weight.grad is None]
            targets, weights = [targets[i] for i in left], [weights[i] for i in left]
        if weights:
            torch._foreach_copy_(targets, weights)
        for param, master in self.pairs():
            master.mark_equal(param)


def give_gradients(used: Sequence[tuple[Parameter, Master]], scaler: LossScaler) -> None:
    """Adds gradients of parameters, divided by the scale, to those of their masters.

    Each parameter of `used` has one. Memory of masters' earlier gradients is used where it is free.
    """
    grads = [param.grad for param, _ in used if param.grad is not None]
    memory = [master.take_memory() for _, master in used]
    for (param, master), grad in zip(used, gather_unscaled(grads, scaler, memory), strict=True):
        weight = master.weight
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        master.note_source(param.grad)
