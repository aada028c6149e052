"""The exchanges of workers that train by themselves: what leaves when, and when it has landed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thalweg.ps import _joining
from thalweg.ps._alike import check_alike
from thalweg.ps._fragment import Fragment
from thalweg.ps._local_bucket import LocalBucket
from thalweg.ps._own_means import Means, warn_of_loss
from thalweg.ps._plan import Outer, Plan
from thalweg.ps._rules import Group
from thalweg.ps._serving import Serving
from thalweg.ps._some import some
from thalweg.ps._step_faults import freezing_of
from thalweg.ps._unequal import explained, mark_of


class Exchange:
    """One worker's side of all exchanges.

    A method that finds the script at fault ends the job, whose other workers would wait for this
    one, and raises RuntimeError.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        serving: Serving,
        fragments: Sequence[Fragment],
        plan: Plan,
        outer: Outer,
        *,
        means: Means | None,
        has_quorum: bool = False,
    ) -> None:
        """The parameters are equal on all workers. All of them make it together. `means`: the
        workers keep what shards would, and take the means of changes so. `has_quorum`: an exchange
        does not wait for all of them.
        """
        self._group = group
        self._serving = serving
        self._fragments = fragments
        self._plan = plan
        self._outer = outer
        self._means = means
        self._has_quorum = has_quorum
        self._steps = 0
        self._exchanged = 0  # fragments, since this was made
        self._waited = 0.0  # seconds
        self._accepts_changes = False
        self._restart()

    def close(self) -> None:
        self._serving.close()

    def stats(self) -> dict[str, float]:
        """Returns how many fragments have been exchanged, the seconds that this worker has waited
        for others and for the network meanwhile, and what the session does not count: bytes that
        its node has sent, and elements of means that are not finite.
        """
        return {
            "exchanges": self._exchanged,
            "exchange_seconds": self._waited,
            "other_bytes_sent": self._means.bytes_sent() if self._means else 0,
            "other_nonfinite_elems": self._means.nonfinite_elems() if self._means else 0,
        }

    def count(self, work: float) -> None:
        """The worker has done so much since the last call."""
        if not self._plan.weighted:
            self._serving.fail("count() needs a LocalOptimizer that was made with weighted=True")
        if not 0 <= work < float("inf"):
            self._serving.fail(f"count() got {work}, expected 0 or more samples or tokens")
        for fragment in self._fragments:
            fragment.work += work

    @explained()
    def check(self, groups: Sequence[Group]) -> None:
        """Is called before each step of the worker."""
        self._check_unchanged()
        if fault := freezing_of(self._buckets(), groups):
            self._serving.fail(fault)

    def note_common_step(self) -> None:
        """Counts a step that is over, and has changed weights on all workers alike."""
        self._steps += 1

    @explained()
    def advance(self) -> None:
        """Is called after each step of the worker: exchanges what is due."""
        self._steps += 1
        self._accepts_changes = False
        leaving = []
        for number, fragment in enumerate(self._fragments):
            fragment.steps += 1
            leaves = self._plan.leaves(number, self._steps)
            # What leaves again lands before: a state may be of a plan with a longer delay.
            if fragment.due == self._steps or (leaves and fragment.due is not None):
                self._land(fragment, self._plan.mix)
            if leaves:
                leaving.append(fragment)
        self._exchange(leaving, self._plan.delay, self._plan.mix, ends=False)
        self._remember()

    @explained()
    def finish(self) -> None:
        """Exchanges all that has been changed since it left, at once. All workers call it."""
        self._check_unchanged()
        if self._has_quorum:
            self._meet(are_kept=True)
        else:
            for fragment in self._fragments:
                self._land_early(fragment)
                if not (fragment.steps or fragment.owes or fragment.has_rest):
                    self._land(fragment, 0.0)  # all that has been changed has left: none is to stay
            self._exchange([each for each in self._fragments if each.steps], 0, 0.0, ends=True)
            self._exchange([each for each in self._fragments if each.has_rest], 0, 0.0, ends=True)
            self._even_out()
        self._remember()

    def _land_early(self, fragment: Fragment) -> None:
        """Puts weights in place that are on their way."""
        if fragment.due is not None:  # where nothing has changed since, nothing is to stay
            self._land(fragment, self._plan.mix if fragment.steps else 0.0)

    def _meet(self, *, are_kept: bool) -> None:
        """Returns when all workers are here, with the same weights, which have what this worker has
        changed if changes `are_kept`.
        """
        for fragment in self._fragments:
            self._land_early(fragment)
            gives = are_kept and (fragment.steps or fragment.has_rest)
            how = {"waits_for_all": True, "gives_nothing": not gives}
            settings = self._serving.number_of(self._outer.groups, **how)
            fragment.leave(1.0, settings, self._steps)
        self._exchanged += len(self._fragments)
        for fragment in self._fragments:
            self._land(fragment, 0.0)

    def publish(self, groups: Sequence[Group]) -> None:
        """Makes rank 0's parameters everybody's, and the shards'. All workers call it."""
        self._serving.check_open()
        self._gather()
        if self._means:
            self._means.forget_rests()
        _joining.broadcast(self._group, groups)
        states: dict[torch.Tensor, Any] = {}
        self._serving.state.read(states)
        self._restart(states)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the shards' float32 weights by name."""
        self._arrive()
        return self._serving.state.weights()

    def state(self) -> dict[str, Any]:
        """Returns what load() takes."""
        self._arrive()
        states: dict[torch.Tensor, Any] = {}
        self._serving.state.read(states)
        named = self._named()
        return {
            "codec": self._means.state() if self._means else {},
            "steps": self._steps,
            "weights": self._serving.state.weights(),
            "outer": {name: states[tensor] for name, tensor in named.items() if states.get(tensor)},
            "fragments": [each.state() for each in self._fragments],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; what the shards have is rank 0's. The parameters may be changed until
        the next step. All workers call it. Raises ValueError on all.
        """
        self._serving.check_open()
        self._gather()
        check_alike(self._group, state, len(self._fragments), has_quorum=self._has_quorum)
        self._serving.state.set_weights(state["weights"])
        named = self._named()
        self._fill({named[name]: dict(values) for name, values in state["outer"].items()})
        if self._means:
            self._means.load(state.get("codec", {}))
        else:
            warn_of_loss(state.get("codec", {}), dist.get_rank(self._group))
        self._steps = state["steps"]
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load(saved)
        self._accepts_changes = True

    def _check_unchanged(self) -> None:
        self._serving.check_open()
        changed = [name for bucket in self._buckets() for name in bucket.changed()]
        if changed and not self._accepts_changes:
            self._serving.fail(
                f"{some(changed)} has been changed by other code than step(), on this worker "
                "alone: call publish() on all workers after changing parameters"
            )

    def _restart(self, states: dict[torch.Tensor, Any] | None = None) -> None:
        """Begins anew from the parameters, which are equal on all workers, and are then as if they
        had been pulled.
        """
        weights = {name: tensor.detach().float() for name, tensor in self._named().items()}
        self._serving.state.set_weights(weights)
        self._fill(states or {})
        for fragment in self._fragments:
            fragment.land(0.0)
            fragment.steps, fragment.work, fragment.was_owing = 0, 0.0, False
        self._remember()

    def _fill(self, states: dict[torch.Tensor, Any]) -> None:
        """Gives rank 0's weights and state to the shards, and its weights to all workers."""
        self._serving.state.publish(states)
        shared = [tensor for bucket in self._buckets() for tensor in bucket.shared()]
        dist._broadcast_coalesced(self._group, shared, 250 << 20, 0)  # type: ignore[attr-defined]

    def _exchange(self, leaving: Sequence[Fragment], delay: int, mix: float, *, ends: bool) -> None:
        if not leaving:
            return
        factors = self._factors(leaving)
        settings = self._number(ends=ends)
        for fragment, factor in zip(leaving, factors, strict=True):
            fragment.leave(factor, settings, self._steps + delay)
        self._exchanged += len(leaving)
        if not delay:
            for fragment in leaving:
                self._land(fragment, mix)

    def _even_out(self) -> None:
        """Makes the mean of the workers' weights those of all, where they have kept a part of what
        they have changed.
        """
        owing = [each for each in self._fragments if each.owes]
        if owing:
            self._number(ends=True)
        for fragment in owing:
            fragment.leave_whole(self._steps)
        for fragment in owing:
            self._land(fragment, 0.0)

    def _number(self, *, ends: bool) -> int:
        """Returns that of an exchange's settings, which say, too, whether finish() `ends` steps."""
        mark = {} if self._has_quorum else mark_of(self._plan, ends=ends)
        return self._serving.number_of(self._outer.groups, **mark)

    def _factors(self, leaving: Sequence[Fragment]) -> list[float]:
        """Returns what this worker's changes count in the mean."""
        if not self._plan.weighted or not any(each.steps for each in leaving):
            return [1.0] * len(leaving)  # nobody has done anything: these are rests
        total = torch.tensor([each.work for each in leaving], dtype=torch.float64, device="cpu")
        try:
            with self._waiting():
                dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            self._serving.fail(f"the work that workers have counted could not be added up: {error}")
        if not bool(total.all()):
            self._serving.fail("no worker has counted anything: call count() before each step")
        workers, sums = dist.get_world_size(self._group), total.tolist()
        return [workers * each.work / sum_ for each, sum_ in zip(leaving, sums, strict=True)]

    def _land(self, fragment: Fragment, mix: float) -> None:
        with self._waiting():
            fragment.land(mix)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def _gather(self) -> None:
        """Returns when nothing of this worker is on its way; with a quorum, nothing of any."""
        if self._has_quorum:
            tensors = [tensor.detach() for tensor in self._named().values()]
            own = [tensor.clone() for tensor in tensors]
            self._meet(are_kept=False)
            torch._foreach_copy_(tensors, own)
        else:
            self._arrive()

    def _arrive(self) -> None:
        for fragment in self._fragments:
            fragment.arrive()

    def _remember(self) -> None:
        for bucket in self._buckets():
            bucket.remember()

    def _buckets(self) -> list[LocalBucket]:
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    def _named(self) -> dict[str, torch.Tensor]:
        return {each.name: each.tensor for b in self._buckets() for each in b.parameters}
