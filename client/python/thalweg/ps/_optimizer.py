"""The optimizer that a training script holds, while shards do its work."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from thalweg._torch import _precision
from thalweg.ps import _downward, _forwards, _joining, _scaling, _upward
from thalweg.ps._bucket import Bucket, Parameter, cut, served
from thalweg.ps._clipping import Clipping
from thalweg.ps._committing import Committing
from thalweg.ps._kept_state import or_rolled_back
from thalweg.ps._pace import Apart, Pace
from thalweg.ps._rules import KINDS, own_bound, rule_of
from thalweg.ps._serving import Serving
from thalweg.ps._sharded import ShardedState
from thalweg.ps._step_faults import stranger_of
from thalweg.ps._unused import Used
from thalweg.ps._wishes import Wishes, check_bound

# By parameter: a weak reference to the ServerOptimizer that was made for it last.
_owners: Any = WeakIdKeyDictionary()


class ServerOptimizer(Clipping):
    """An optimizer whose step is done on the shards, by one for all workers.

    Every worker of the process group makes it, with a model that is not in DistributedDataParallel.
    Then rank 0's parameters are on all workers, those that require no gradient too. A backward pass
    pushes each gradient as soon as it is there; step() waits for the weights that result from the
    mean of all workers' gradients. Parameters without gradients stay as they are, as do buffers.

    `optimizer` is "sgd", "adam", "adamw" or "lamb"; `options` are the arguments of torch's, and of
    thalweg.optim.FusedLAMB, with their defaults. Groups, schedulers, `zero_grad` and `state_dict`
    are those of such an optimizer, and checkpoints can be exchanged with it in both directions.
    `pull` says in what the weights come: "fp32", "bf16", "fp16", or as the parameters are (None);
    with "int8" and "onebit" comes what float32 weights have changed by, rounded, and the rest of it
    in later steps. Shards keep weights in float32. `max_grad_norm`: gradients are clipped as by
    clip_grad_norm_ over all groups, in the step; LAMB clips to 1 unless given. `loss_scaling`: a
    GradScaler may have scaled the loss, and decides whether to step. `overlap`: step() does not
    wait; a module's forward() waits for its own weights, and Module.state_dict() for all; call
    wait() before anything else reads weights. `find_unused_parameters`: a parameter may get no
    gradient in a step, and stays as it is, with its state, if it gets none on any worker; all
    workers call step(), those without gradients too. With any of these, and with LAMB, weights come
    when all gradients have been pushed. `bucket_cap_mb` MiB of parameters travel together: 25
    unless given, 4 with `overlap`; with `find_unused_parameters` each travels alone, and there are
    no snapshots. `process_group` is the default one if None. `codec` (of gradients), `timeout`,
    `step_timeout`, `chunk_bytes` and `local_shards` are those of thalweg.ddp.attach(). `mode` says
    which nodes wait for each other: "sync", all in each step. "stale": a node gets the weights of
    the moment, which lack at most `staleness` of the steps before its own; each step still has the
    mean of all nodes, and they do equally many. "async": each node's gradient is an update by
    itself, for which nobody waits; with `delay_aware`, the learning rate is divided by how many
    others came in between. Call finish() at the end of these two, which take no LAMB, clipping,
    loss scaling, overlap nor snapshots. With `snapshot_every`, aggregators that have a folder for
    it write what they keep to it after so many steps. When one has lost its memory, step() raises
    RolledBack on all workers: they have a snapshot's weights.

    Raises on all workers, saying what is wrong, what thalweg.ddp.attach() raises; ValueError also
    for options that shards do not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: str,
        *,
        pull: str | None = None,
        max_grad_norm: float | None = None,
        loss_scaling: bool = False,
        overlap: bool = False,
        find_unused_parameters: bool = False,
        mode: str = "sync",
        staleness: int | None = None,
        delay_aware: bool = False,
        bucket_cap_mb: float | None = None,
        snapshot_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        codec: object = None,
        timeout: float | None = None,
        step_timeout: float | str | None = None,
        chunk_bytes: int | None = None,
        local_shards: str | bool | None = None,
        **options: Any,  # noqa: ANN401 - torch checks them
    ) -> None:
        if optimizer not in KINDS:
            raise ValueError(f"thalweg: optimizer {optimizer!r}, expected {', '.join(KINDS)}")
        pace = Pace.of(mode, staleness, delay_aware=delay_aware)
        if not dist.is_initialized():
            raise RuntimeError("thalweg: call torch.distributed.init_process_group() first")
        if KINDS[optimizer].measures and max_grad_norm is not None:
            options["max_grad_norm"] = check_bound(max_grad_norm)
            max_grad_norm = None
        local = KINDS[optimizer].torch(params, **options)
        super().__init__(local.param_groups, local.defaults)
        arguments = {
            "codec": codec,
            "timeout": timeout,
            "step_timeout": step_timeout,
            "chunk_bytes": chunk_bytes,
            "local_shards": local_shards,
            "snapshot_every": snapshot_every,
        }
        group = process_group or dist.group.WORLD
        assert group is not None
        self._begin(
            Wishes(
                optimizer,
                group,
                arguments,
                pull=pull,
                max_grad_norm=check_bound(max_grad_norm),
                loss_scaling=loss_scaling,
                overlap=overlap,
                finds_unused=find_unused_parameters,
                bucket_cap_mb=bucket_cap_mb,
                pace=pace,
            )
        )

    def _begin(self, wishes: Wishes) -> None:
        """Does what is left to do where this is a torch optimizer of the kind wished for."""
        kind, group = KINDS[wishes.kind], wishes.group
        wishes.check()
        rule = rule_of(self.param_groups)
        own_bound(self.param_groups)
        parameters = served(self.param_groups, apart=kind.measures)
        if not parameters:
            raise ValueError("thalweg: no parameter requires a gradient")
        named = [(each.name, each.tensor) for each in parameters]
        dtypes = {each.tensor.dtype for each in parameters}
        pulls = {each: _downward.chosen(wishes.pull, each, differences=True) for each in dtypes}
        join = functools.partial(
            _joining.join,
            group,
            named,
            wishes.describe(rule),
            wishes.arguments,
            choose=functools.partial(_upward.chosen, why_dense=wishes.why_dense),
            why_no_snapshots=wishes.why_no_snapshots,
        )
        joined = join()
        buckets = [
            Bucket(
                joined.session,
                number,
                each,
                kind=kind,
                rule=rule,
                commits=wishes.commits,
                pull=pulls[each[0].tensor.dtype],
                pace=wishes.pace,
            )
            for number, each in enumerate(cut(parameters, wishes.bucket_bytes, joined.codecs))
        ]
        _joining.broadcast(group, self.param_groups)
        is_first = dist.get_rank(group) == 0
        self._wishes = wishes
        snapshots = self._begin_snapshots(joined, join, is_first=is_first)
        self._serving = Serving(
            joined.session,
            buckets,
            kind,
            rule,
            commits=wishes.commits,
            is_first=is_first,
            snapshots=snapshots,
            apart=Apart.of(wishes.pace, joined),
            used=Used(group, parameters) if wishes.finds_unused else None,
        )
        self.stats = self._serving.stats
        self._buckets = buckets
        self._accumulates = False
        self._hooks = [
            each.tensor.register_post_accumulate_grad_hook(self._hook_of(bucket, each))
            for bucket in buckets
            for each in bucket.parameters
        ]
        self._committing = Committing(self._serving, wishes.max_grad_norm)
        self._step_supports_amp_scaling = wishes.loss_scaling
        _precision.watch(self._serving)
        if wishes.overlap:
            self._hooks.append(_forwards.watch(self._serving))
        if wishes.loss_scaling:
            _scaling.watch(self)

    @or_rolled_back
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Waits for the new weights. Raises RuntimeError, which ends the job, where a parameter
        that requires a gradient got none, settings have changed since the backward pass, or another
        worker, node or shard has failed. RolledBack: all workers have the weights of an earlier
        step again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._serving.check_open()
        if fault := stranger_of(self._buckets, self.param_groups):
            self._serving.fail(fault)
        self._serving.complete(self.param_groups, self.state)
        if self._serving.is_idle:
            return loss
        if self._wishes.commits:
            # GradScaler sets these for step(); the scale is None where unscale_() has been called.
            scale = getattr(self, "grad_scale", None)
            has_updated = self._committing.finish_step(
                self.param_groups,
                None if scale is None else float(scale),
                is_finite=not float(getattr(self, "found_inf", 0.0)),
            )
        else:
            self._serving.finish_step(self.param_groups)
            has_updated = True
        if not self._wishes.overlap:
            self._serving.wait()
        self._serving.updates += has_updated
        return loss

    @or_rolled_back
    def wait(self) -> None:
        """Waits until the weights of the last step are in place."""
        self._serving.wait()

    @property
    def shards(self) -> ShardedState:
        """The whole state, for torch.distributed.checkpoint: each worker saves and loads a part."""
        kind = KINDS[self._wishes.kind]
        return ShardedState(self._serving, self._buckets, kind, self, self._joined.meeting)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in it only add up gradients; the next one after it pushes the sums."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add up gradients now."""
        return self._accumulates

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients that have not been pushed; they become None always."""
        super().zero_grad(set_to_none=True)

    def close(self) -> None:
        """Leaves the job. Parameters stay as they are. May be called again."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            for each in bucket.parameters:
                if _owners.get(each.tensor, weakref.ref(bucket))() is self:
                    del _owners[each.tensor]
        self._serving.close()

    def _hook_of(self, bucket: Bucket, parameter: Parameter) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)  # parameters may outlive the optimizer
        _owners[parameter.tensor] = ref

        def hook(tensor: Tensor) -> None:
            ours = ref()
            if ours is None or ours._accumulates:
                return
            if _owners.get(tensor, ref)() not in (ours, None):
                ours._serving.fail(
                    f"{parameter.name} belongs to another ServerOptimizer, which was made later: "
                    "call close() of the former one before"
                )
            if tensor.grad is not None and tensor.grad.layout != torch.strided:
                ours._serving.fail(
                    f"{parameter.name} got a sparse gradient, which shards do not take: make its "
                    "module with sparse=False, or leave it to an optimizer of torch's"
                )
            ours._serving.gather(bucket, parameter, ours.param_groups, ours.state)

        return hook
