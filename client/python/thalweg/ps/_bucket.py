"""Parameters that are pushed and pulled together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.futures import Future

from thalweg import _C
from thalweg.ps import _downward
from thalweg.ps._pace import Pace
from thalweg.ps._parameters import Parameter
from thalweg.ps._pushed_grad import PushedGrad
from thalweg.ps._rules import Kind, Rule
from thalweg.ps._seen import Seen
from thalweg.ps._staging import Staging, flattened, on_cpu

if TYPE_CHECKING:
    from thalweg.ps._kept import KeptWeights

_GRANULE = 4096  # elements of a parameter whose squares are summed together
_TOGETHER = Pace()


class Bucket:
    """One bucket of a session. Gradients are gathered until all are there, then pushed together."""

    def __init__(
        self,
        session: _C.Session,
        number: int,
        parameters: Sequence[Parameter],
        *,
        kind: Kind,
        rule: Rule,
        commits: bool,
        pull: str,
        pace: Pace = _TOGETHER,
        kept: KeptWeights | None = None,
    ) -> None:
        """`kept`: the workers keep what shards would, in the shards' place."""
        self.parameters = parameters
        self._kept = kept
        self._kind = kind
        self._pulled = _downward.type_of(pull)

        def serve(session: _C.Session) -> _C.ServedBucket:
            return _C.ServedBucket(
                session,
                number=number,
                named_parameters=[(each.name, on_cpu(each.tensor)) for each in parameters],
                groups=[each.settings for each in parameters],
                optimizer=kind.native,
                decoupled=rule.decoupled,
                nesterov=rule.nesterov,
                maximize=rule.maximize,
                commits=commits,
                down=pull,
                **pace._asdict(),
            )

        self._serve = serve
        first = parameters[0].tensor
        elems = sum(each.tensor.numel() for each in parameters)
        from_gpu = any(tensor.is_cuda for tensor in self._tensors())
        dtype = torch.float32 if kept else first.dtype
        self._grads = Staging(elems, dtype, from_gpu=from_gpu)
        views = self._views(self._grads.flat)
        self._places = dict(zip(map(id, self._tensors()), views, strict=True))
        self._gathered: set[int] = set()
        self._coming: Future[Tensor] | None = None  # what the last push gives, until it is taken
        self.waited = self._told = 0.0  # seconds, for weights; of these the sidecar has heard
        self._seen = Seen(parameters)
        # What the parameters have got, where that is not what the shards have, rounded.
        self._followed: Tensor | None = None
        self._follows = pull in _downward.DIFFERENCES
        self.connect(session)

    def connect(self, session: _C.Session) -> None:
        """Goes on in that session, with nothing gathered and nothing on its way."""
        self._served = cast("_C.ServedBucket | None", self._kept) or self._serve(session)
        self._gathered.clear()
        self._coming = None
        self.is_coming = False  # weights are, and not what else a push may give

    @property
    def is_full(self) -> bool:
        return len(self._gathered) == len(self.parameters)

    @property
    def is_empty(self) -> bool:
        return not self._gathered

    def has(self, parameter: Parameter) -> bool:
        """Whether the parameter's gradient has been gathered."""
        return id(parameter.tensor) in self._gathered

    def missing(self) -> list[str]:
        """Returns the names of the parameters that have no gradient in this step."""
        return [each.name for each in self.parameters if id(each.tensor) not in self._gathered]

    def overwritten(self) -> list[str]:
        """Returns the names of those whose gradient somebody has put back."""
        return [each.name for each in self.parameters if each.has_gradient]

    def gather(self, parameter: Parameter) -> bool:
        """Takes the parameter's gradient away, or zeros if it has none; returns whether it has one.
        Call it once in a step.
        """
        tensor = parameter.tensor
        self._gathered.add(id(tensor))
        if not parameter.has_gradient:
            self._places[id(tensor)].zero_()
            return False
        assert tensor.grad is not None
        self._grads.fill(self._places[id(tensor)], tensor.grad)
        tensor.grad = None
        tensor.grad = PushedGrad(tensor, parameter.name, self._gathered)
        return True

    def push(self, settings: int) -> None:
        """Sends the gradients, all of which have been gathered."""
        waited, self._told = self.waited - self._told, self.waited
        self._coming = self._served.push(self._grads.settled(), settings, waited)

    def squares(self) -> tuple[list[Tensor], int]:
        """With an update that commits: waits for the squares of the mean gradients. Returns them
        by parameter and granule, in float64, and how many elements are not finite.
        """
        assert self._coming is not None
        numbers = self._coming.wait()
        return self._by_granule(numbers[:-1]), int(numbers[-1])

    def measure(self, settings: int) -> None:
        """After that, with an update that measures: lets the shards do it, with these settings."""
        self._coming = self._served.measure(settings)

    def norms(self) -> list[tuple[float, float]]:
        """Waits for what the shards have measured. Returns by parameter the sum of the squares of
        its weights, and that of its update.
        """
        assert self._coming is not None
        halves = self._coming.wait()[:-1].chunk(2)
        of_weights, of_updates = (
            [_C.total_of_squares(part) for part in self._by_granule(half)] for half in halves
        )
        return list(zip(of_weights, of_updates, strict=True))

    def commit(self, settings: int) -> None:
        """After that: lets the shards update, with these settings."""
        self._coming = self._served.pull(settings)
        self.expect()

    def expect(self) -> None:
        """The weights are on their way."""
        self._gathered.clear()
        self._seen.note_memory()
        self.is_coming = True

    def drop(self) -> None:
        """Forgets the gradients, and lets the weights stay."""
        self._coming = None
        self._gathered.clear()

    def land(self) -> None:
        """Waits for weights that are on their way, and puts them in place. Raises RuntimeError."""
        if not self.is_coming:
            return
        assert self._coming is not None
        began = time.perf_counter()
        weights = self._coming.wait()
        self.waited += time.perf_counter() - began
        self._coming = None
        self.is_coming = False
        self.place(self._views(weights))
        if self._follows:
            self._followed = weights  # the next differences are added there, and it takes no more

    def settle(self) -> None:
        """Waits for what the last push gives, if nobody has taken it. Raises RuntimeError."""
        if self._coming is not None:
            self._coming.wait()

    @torch.no_grad()
    def place(self, weights: Sequence[Tensor]) -> None:
        """Makes the parameters what they are when such weights have been pulled."""
        self._followed = None
        torch._foreach_copy_(self._tensors(), [each.to(self._pulled) for each in weights])
        self.remember()

    def remember(self) -> None:
        """The parameters are what the shards have, or will be."""
        self._seen.remember()

    def changed(self) -> list[str]:
        """Returns the names of parameters that somebody has changed since."""
        return self._seen.changed()

    def differing(self, weights: Sequence[Tensor]) -> list[str]:
        """Returns the names of parameters that are not what the shards' float32 `weights` have made
        them: also of those that somebody has changed through `data`, which torch does not count.
        """
        if self._followed is not None:
            pulled = self._views(self._followed)
        else:
            pulled = [each.to(self._pulled) for each in weights]
        changed = set(self.changed())
        return [
            each.name
            for each, value in zip(self.parameters, pulled, strict=True)
            if each.name in changed
            or not torch.equal(value.to(each.tensor.dtype), each.tensor.detach().cpu())
        ]

    def overtaken(self) -> list[str]:
        """Returns the names of parameters that weights on their way would take a change from."""
        return self._seen.overtaken() if self.is_coming else []

    def read(self) -> tuple[list[dict[str, Tensor]], int]:
        """Returns by parameter what torch calls the state, and the steps done."""
        states: list[dict[str, Tensor]] = [{} for _ in self.parameters]
        steps = 0
        for slice_, name in enumerate(self._kind.moments, start=1):
            values, steps = self._served.read(slice_)
            if values is None:
                continue
            for state, view in zip(states, self._views(values), strict=True):
                state[name] = view.clone()
        return states, steps

    def weights(self) -> list[Tensor]:
        """Returns the shards' float32 weights, by parameter."""
        values = self._served.read(0)[0] if len(self._grads.flat) else torch.empty(0, device="cpu")
        if values is None:
            names = ", ".join(each.name for each in self.parameters)
            raise RuntimeError(f"thalweg: the shards have no weights of {names}")
        return [view.clone() for view in self._views(values)]

    def write(
        self, weights: Sequence[Tensor], states: Sequence[dict[str, Tensor]], steps: int
    ) -> None:
        """Makes these float32 weights and states, by parameter, what the shards have."""
        self._served.write(0, flattened(list(weights)), steps)
        for slice_, name in enumerate(self._kind.moments, start=1):
            moments = [state.get(name) for state in states]
            values = None
            if any(moment is not None for moment in moments):
                zeros = [torch.zeros_like(each, dtype=torch.float32) for each in self._tensors()]
                pairs = zip(moments, zeros, strict=True)
                values = flattened([zero if one is None else one for one, zero in pairs])
            self._served.write(slice_, values, steps)

    def _by_granule(self, squares: Tensor) -> list[Tensor]:
        """Returns the part of each parameter."""
        return list(squares.split([-(-tensor.numel() // _GRANULE) for tensor in self._tensors()]))

    def _tensors(self) -> list[Tensor]:
        return [each.tensor for each in self.parameters]

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Returns the part of each parameter, in its shape."""
        tensors = self._tensors()
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
