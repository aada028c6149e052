"""Local updates, as DiLoCo has them: workers step by themselves and seldom exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thalweg import codecs
from thalweg._settings._arguments import JobArguments
from thalweg.codecs import OF_WORKERS, OfWorkers
from thalweg.ps._beginning import begin, check_masters, ddp_modules
from thalweg.ps._fixed_groups import FixedGroups
from thalweg.ps._pace import Pace
from thalweg.ps._plan import Plan
from thalweg.ps._wishes import LocalWishes

_NESTEROV = {"name": "nesterov"}


class LocalOptimizer(FixedGroups):
    """A worker's own optimizer, whose changes of the weights are exchanged every so many steps.

    Every worker of the process group makes it, with a model that is not in DistributedDataParallel.
    Then rank 0's parameters are on all workers, those that require no gradient too. step() is that
    of `inner`. After `every` steps, the mean of what the workers have changed is the gradient of
    the outer optimizer, which is on the shards, and its weights replace the workers'. All workers
    do equally many steps. Buffers stay as they are.

    Groups and state are those of `inner`: schedulers take either, GradScaler only this one. A step
    that a GradScaler leaves out counts like the others. Shards keep weights in float32.

    With a `quorum`, workers need not do equally many steps, and have the same weights after
    finish(), publish() and load_state_dict() alone, which wait for all. A node that comes later
    than its grace gets the weights of the moment.

    Of what thalweg.ddp.attach() has, None means what the environment says. What is wrong is raised
    on all workers.

    Args:
        inner: the worker's own optimizer, of any kind.
        every: steps from one exchange of a weight to the next, 1 or more.
        outer: has the "name" of the outer optimizer, and torch's arguments for it: "nesterov" (lr
            0.7, momentum 0.9, unless given), "sgd" (lr 1: the mean of the workers' weights), "adam"
            or "adamw".
        fragments: the parameters are exchanged in so many parts of about the same size, each after
            `every` steps, one after the other; 1 to `every`.
        delay: steps. New weights take their place so many after the old ones have left, and travel
            meanwhile; 0 to `every` - 1.
        mix: how much of the worker's own weights stays then, from 0 to below 1.
        weighted: workers count in the mean by what they tell count(). That takes one small
            all_reduce of the process group in each exchange.
        pull: in what the weights come: "fp32", "bf16", "fp16", or as the parameters are (None). It
            goes with codecs of floats: with others no weights come.
        bucket_cap_mb: MiB of parameters that travel together.
        process_group: the workers; the default process group if None.
        codec: of what has changed: any that thalweg.ddp.attach() takes, thalweg.ps.Signs or
            thalweg.ps.Sparse. With lossy ones every worker runs the outer optimizer, and shards
            only take means. With the last two, what a worker does not send stays in its own
            weights, until finish() sends all.
        timeout, chunk_bytes, local_shards: those of thalweg.ddp.attach().
        step_timeout: seconds that the last worker may come to an exchange later than the first, or
            "auto", as for thalweg.ddp.attach().
        quorum: nodes for which an exchange waits, 1 or more; None: it waits for all. It goes with
            codecs and pulls of floats, and not with `weighted` and `fragments`.
        grace: seconds that an exchange waits for others after its quorum, 0 to 86400. None waits
            for those that usually come a little later.
        late: what becomes of what a node has changed that comes later than that: "keep": it counts
            in the next exchange; "drop": not at all.
        min_nodes: goes with `quorum`, and only with it: that of thalweg.ddp.attach().

    Raises:
        ValueError: arguments do not fit, or workers differ.
        ConnectionError, TimeoutError, RuntimeError: as thalweg.ddp.attach() does.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        *,
        every: int,
        outer: Mapping[str, Any] = _NESTEROV,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        weighted: bool = False,
        pull: str | None = None,
        bucket_cap_mb: float = 25.0,
        process_group: dist.ProcessGroup | None = None,
        codec: object = None,
        timeout: float | None = None,
        step_timeout: float | str | None = None,
        chunk_bytes: int | None = None,
        local_shards: str | bool | None = None,
        quorum: int | None = None,
        grace: float | None = None,
        late: str = "keep",
        min_nodes: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("thalweg: call torch.distributed.init_process_group() first")
        group = process_group or dist.group.WORLD
        assert group is not None
        own = _of_workers(codec)
        wishes = LocalWishes(
            group,
            JobArguments(
                codec="fp32" if own else codec,
                timeout=timeout,
                step_timeout=step_timeout,
                chunk_bytes=chunk_bytes,
                local_shards=local_shards,
                min_nodes=min_nodes,
            ),
            Plan(every, fragments, delay, mix, weighted),
            outer,
            pull=pull,
            bucket_cap_mb=bucket_cap_mb,
            own=own,
            pace=Pace.of_quorum(quorum, grace, late),
        )
        wishes.check()
        check_masters(inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._follow()
        session, self._exchange = begin(inner, wishes)
        self._session = session
        ref = weakref.ref(self)  # `inner` may outlive the optimizer
        self._hooks = [inner.register_load_state_dict_post_hook(lambda _: _follow(ref))]
        self._is_stepping = False
        self.every = every
        self._has_stepped = False
        self._guard()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Does a step of `inner`, and exchanges what is due. Raises RuntimeError, which ends the
        job, where other code has changed parameters, or another worker, node or shard has failed.
        """
        if not self._has_stepped and ddp_modules(self.param_groups) - self._before:
            self._refuse_ddp()
        self._has_stepped = True
        self._exchange.check(self.param_groups)
        self._is_stepping = True
        try:
            loss = self._step_alone(closure)
        finally:
            self._is_stepping = False
        self._exchange.advance()
        return loss

    def stats(self) -> dict[str, float]:
        """Returns the counters of the job, as thalweg.ddp.State does; and how many fragments have
        been exchanged ("exchanges"), and for how long step() has waited for that
        ("exchange_seconds"), for slower workers too.
        """
        stats = self._session.stats() | self._exchange.stats()
        other = stats.pop("other_bytes_sent")
        stats["wire_bytes_sent"] += other
        stats["link_bytes_sent"] += other
        stats["nonfinite_elems"] += stats.pop("other_nonfinite_elems")
        return stats

    def count(self, work: float) -> None:
        """Tells how many samples, tokens or the like this worker has trained with since the last
        call: call it before each step(). RuntimeError: the optimizer is not weighted.
        """
        self._exchange.count(work)

    def finish(self) -> None:
        """Exchanges at once all that has been changed since the last exchange, and puts weights in
        place that are on their way: then all workers have the same. Call it on all workers, at the
        end of a training, or before an evaluation.
        """
        self._exchange.finish()

    def publish(self) -> None:
        """Makes rank 0's parameters those of all workers and of the shards. Call it on all workers
        after changing parameters by hand. What workers have changed since the last exchange, and
        what their codec holds back, is forgotten; the outer optimizer's state stays.
        """
        self._exchange.publish(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `inner` returns, and as "local" the outer weights and state, how far the
        worker is, and what its codec holds back. One worker may call it alone, between two steps.
        """
        return self.inner.state_dict() | {"local": self._exchange.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() returned. Call it on all workers, which load the same step's;
        shards get rank 0's. The model may be loaded before or after. Raises ValueError on all where
        the states do not fit, and for one without "local".
        """
        if "local" not in state_dict:
            raise ValueError(
                "thalweg: this is the state of no LocalOptimizer: load it into the inner "
                "optimizer, before making LocalOptimizer"
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "local"})
        self._exchange.load(state_dict["local"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the outer float32 weights by name: the result of the last exchange. One worker
        may call it alone, between two steps.
        """
        return self._exchange.weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def close(self) -> None:
        """Leaves the job. Parameters stay as they are. May be called again."""
        for hook in self._hooks:
            hook.remove()
        self._exchange.close()

    def _guard(self) -> None:
        """Lets nobody but step() call the inner optimizer's, nor use DistributedDataParallel."""
        ref = weakref.ref(self)
        self._hooks.append(self.inner.register_step_pre_hook(lambda *_: _check_caller(ref)))
        # An earlier part of the training may have left modules, as long as nobody uses them now.
        self._before = ddp_modules(self.param_groups)
        self._hooks += [
            each.register_forward_pre_hook(lambda *_: _refuse(ref)) for each in self._before
        ]

    def _follow(self) -> None:
        """Takes what `inner` has. It makes new groups when it is loaded."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401
        """Does what GradScaler leaves to an optimizer that supports scaling, and the step."""
        if float(getattr(self, "found_inf", 0.0)):
            return None
        scale = getattr(self, "grad_scale", None)  # None where unscale_() has been called
        if scale is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            torch._foreach_div_([grad for grad in grads if grad is not None], float(scale))
        return self.inner.step(closure)

    def _refuse_ddp(self) -> NoReturn:
        self.close()
        raise RuntimeError(
            "thalweg: the model is in DistributedDataParallel, which averages gradients in every "
            "step: LocalOptimizer takes its place, so train the plain module"
        )


def _of_workers(codec: object) -> OfWorkers | None:
    """Returns the codec if workers have it, or its text. Raises ValueError, also for one of which
    there is no codec at all.
    """
    if isinstance(codec, str) and _first_name(codec) not in {kind.name for kind in codecs.ALL}:
        try:
            codec = codecs.parse(codec, also=OF_WORKERS)
        except ValueError as error:
            raise ValueError(f"thalweg: {error}") from None
    return codec if isinstance(codec, OfWorkers) else None


def _first_name(text: str) -> str:
    """Returns the name of the codec in a text, or of the default one of a policy."""
    return text.partition(";")[0].partition(":")[0].strip()


def _follow(ref: weakref.ref[LocalOptimizer]) -> None:
    ours = ref()
    if ours is not None:
        ours._follow()


def _refuse(ref: weakref.ref[LocalOptimizer]) -> None:
    ours = ref()
    if ours is not None and torch.is_grad_enabled():
        ours._refuse_ddp()


def _check_caller(ref: weakref.ref[LocalOptimizer]) -> None:
    """Raises RuntimeError where the inner optimizer steps, and nobody counts it."""
    ours = ref()
    if ours is not None and not ours._is_stepping:
        ours.close()
        raise RuntimeError(
            "thalweg: step() of the inner optimizer was called, and nothing would be exchanged: "
            "call that of LocalOptimizer, and give it to GradScaler and trainers; if that is "
            "another LocalOptimizer, call close() of this one before"
        )
