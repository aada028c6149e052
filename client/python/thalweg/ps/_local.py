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
from thalweg.codecs import Sparse
from thalweg.ps._beginning import begin, check_masters, ddp_modules
from thalweg.ps._fixed_groups import FixedGroups
from thalweg.ps._pace import Pace
from thalweg.ps._plan import Plan

_NESTEROV = {"name": "nesterov"}


class LocalOptimizer(FixedGroups):
    """A worker's own optimizer, whose changes of the weights are exchanged every so many steps.

    Every worker of the process group makes it, with a model that is not in DistributedDataParallel.
    Then rank 0's parameters are on all workers, those that require no gradient too. step() is that
    of `inner`. After `every` steps, the mean of what the workers have changed is the gradient of
    the outer optimizer, which is on the shards, and its weights replace the workers'. All workers
    do equally many steps. Buffers stay as they are.

    `outer` has the "name" of that optimizer, and torch's arguments for it: "nesterov" (lr 0.7,
    momentum 0.9, unless given), "sgd" (lr 1: the mean of the workers' weights), "adam" or "adamw".
    `fragments`: the parameters are exchanged in so many parts of about the same size, each after
    `every` steps, one after the other. `delay`: new weights take their place so many steps after
    the old ones have left, and travel meanwhile. `mix`: how much of the worker's own weights stays
    then. `weighted`: workers count in the mean by what they tell count(), which takes one small
    all_reduce of the process group in each exchange. `pull` says in what the weights come: "fp32",
    "bf16", "fp16", or as the parameters are (None); shards keep them in float32. `bucket_cap_mb`
    MiB of parameters travel together. `process_group` is the default one if None. `codec`, of what
    has changed, is any that thalweg.ddp.attach() takes, or thalweg.ps.Sparse; with lossy ones every
    worker runs the outer optimizer, and shards only take means. `timeout`, `step_timeout`,
    `chunk_bytes`, `local_shards` and `min_nodes` are those of attach(), the last one only with a
    `quorum`; the last worker may come `step_timeout` later to an exchange than the first.

    `quorum`: an exchange waits for so many nodes, not for all, and for others as long as their
    `grace`, in seconds; None waits for those that usually come a little later. A node that comes
    later than that gets the weights of the moment, and what it has changed counts in the next
    exchange, or with `late` "drop" not at all. It goes with codecs and pulls of floats, and not
    with `weighted` and `fragments`. Then workers need not do equally many steps, and have the same
    weights after finish(), publish() and load_state_dict() alone, which wait for all.

    Groups and state are those of `inner`: schedulers take either, GradScaler only this one. A step
    that a GradScaler leaves out counts like the others.

    Raises on all workers, saying what is wrong, what thalweg.ddp.attach() raises; ValueError also
    for arguments that do not fit.
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
        plan = Plan(every, fragments, delay, mix, weighted)
        plan.check()
        pace = Pace.of_quorum(quorum, grace, late)
        if min_nodes and quorum is None:
            raise ValueError("thalweg: min_nodes goes with quorum: without one all are needed")
        if quorum is not None and (weighted or fragments > 1):
            raise ValueError(
                "thalweg: quorum does not go with weighted, which needs the sum of what all "
                "workers have counted, nor with fragments, of which nodes could wait for each "
                "other's"
            )
        check_masters(inner)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._follow()
        group = process_group or dist.group.WORLD
        assert group is not None
        sparse = _sparse(codec)
        arguments = {
            "codec": "fp32" if sparse else codec,
            "timeout": timeout,
            "step_timeout": step_timeout,
            "chunk_bytes": chunk_bytes,
            "local_shards": local_shards,
            "min_nodes": min_nodes,
        }
        session, self._exchange = begin(
            *(inner, plan, outer, group, arguments),
            pull=pull,
            bucket_cap_mb=bucket_cap_mb,
            sparse=sparse,
            pace=pace,
        )
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
        stats["wire_bytes_sent"] += stats.pop("other_bytes_sent")
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
        after changing parameters by hand. What workers have changed since the last exchange is
        forgotten; the outer optimizer's state stays.
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


def _sparse(codec: object) -> Sparse | None:
    """Returns the codec if it is Sparse, or its text. Raises ValueError."""
    if isinstance(codec, str) and codec.partition(":")[0] == Sparse.name:
        try:
            codec = codecs.parse(codec, also=[Sparse])
        except ValueError as error:
            raise ValueError(f"thalweg: {error}") from None
    return codec if isinstance(codec, Sparse) else None


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
