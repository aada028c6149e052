"""The optimizer that a training script holds, while shards do its work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from thalweg._settings._arguments import JobArguments
from thalweg._torch import _precision
from thalweg.ps import _downward, _forwards, _joining, _pushing, _scaling, _upward
from thalweg.ps._bucket import Bucket
from thalweg.ps._clipping import Clipping
from thalweg.ps._committing import Committing
from thalweg.ps._kept_state import or_rolled_back
from thalweg.ps._pace import Apart, Pace
from thalweg.ps._parameters import cut, served
from thalweg.ps._rules import KINDS, make, own_bound, rule_of
from thalweg.ps._serving import Serving
from thalweg.ps._sharded import ShardedState
from thalweg.ps._step_faults import overtaking_of, stranger_of
from thalweg.ps._unused import Used
from thalweg.ps._wishes import Wishes, check_bound


class ServerOptimizer(Clipping):
    """An optimizer whose step is done on the shards, by one for all workers.

    Every worker of the process group makes it, with a model that is not in DistributedDataParallel.
    Then rank 0's parameters are on all workers, those that require no gradient too. A backward pass
    pushes each gradient as soon as it is there; step() waits for the weights that result from the
    mean of all workers' gradients. Parameters without gradients stay as they are, as do buffers.

    It is a torch optimizer: groups, schedulers, `zero_grad` and `state_dict` are those of one of
    the kind, and checkpoints can be exchanged with it in both directions. Shards keep weights in
    float32. With `max_grad_norm`, `loss_scaling`, `overlap` or `find_unused_parameters`, and with
    LAMB, weights come when all gradients have been pushed.

    Of `snapshot_every` and what thalweg.ddp.attach() has, None means what the environment says.
    What is wrong is raised on all workers.

    Args:
        params: tensors, named tensors or groups, as any torch optimizer takes them; float32,
            float16 or bfloat16.
        optimizer: "sgd", "adam", "adamw" or "lamb".
        pull: in what the weights come: "fp32", "bf16", "fp16", or as the parameters are (None).
            With "int8" and "onebit" comes what float32 weights have changed by, rounded, and the
            rest of it in later steps.
        max_grad_norm: gradients are clipped to this norm, more than 0, as by clip_grad_norm_ over
            all groups, in the step. None: they are not, but LAMB clips to 1.
        loss_scaling: a GradScaler may have scaled the loss, and decides whether to step.
        overlap: step() does not wait. A module's forward() waits for its own weights, and
            Module.state_dict() for all. Call wait() before anything else reads weights.
        find_unused_parameters: a parameter may get no gradient in a step. If it gets none on any
            worker, it stays as it is, with its state; zeros of zero_grad(set_to_none=False) are
            one. All workers call step(), those without gradients too. There are no snapshots.
        mode: which nodes wait for each other. "sync": all in each step. "stale": a node gets the
            weights of the moment; each step still has the mean of all nodes, and they do equally
            many. "async": each node's gradient is an update by itself, for which nobody waits. The
            last two take no LAMB, clipping, loss scaling, overlap, unused parameters, snapshots nor
            `pull` of what has changed. Call finish() at their end.
        staleness: goes with "stale", and only with it: how many of the steps before its own the
            weights of a node lack at most, 0 to 64.
        delay_aware: goes with "async": the learning rate is divided by how many others came in
            between.
        bucket_cap_mb: MiB of parameters that travel together; 25 unless given, 4 with `overlap`.
            With `find_unused_parameters` each travels alone.
        snapshot_every: steps. Aggregators that have a folder for it write what they keep to it
            after so many; with 0 they do not. When one has lost its memory, step() raises
            RolledBack on all workers: they have a snapshot's weights.
        process_group: the workers; the default process group if None.
        codec: of gradients: floats, int8, onebit or topk, given as to thalweg.ddp.attach().
        timeout, step_timeout, chunk_bytes, local_shards: those of thalweg.ddp.attach().
        options: the arguments of torch's optimizer, or of thalweg.optim.FusedLAMB, with their
            defaults.

    Raises:
        ValueError: arguments do not fit, shards do not have an option, or workers differ.
        ConnectionError, TimeoutError, RuntimeError: as thalweg.ddp.attach() does.
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
        local = make(optimizer, params, options, f"ServerOptimizer(…, {optimizer!r})")
        super().__init__(local.param_groups, local.defaults)
        arguments = JobArguments(
            codec=codec,
            timeout=timeout,
            step_timeout=step_timeout,
            chunk_bytes=chunk_bytes,
            local_shards=local_shards,
            snapshot_every=snapshot_every,
        )
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
        self._show_state()
        self.stats = self._serving.stats
        self._buckets = buckets
        self._accumulates = False
        self._hooks = [
            _pushing.watch(self, bucket, each) for bucket in buckets for each in bucket.parameters
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

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        self._accumulates = value

    def close(self) -> None:
        """Leaves the job, with the weights of the last step. May be called again.

        With snapshots, a call while an exception is on its way, or is being handled, fails the job
        instead: its snapshots stay.
        """
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            _pushing.disown(self, bucket.parameters)
        if not self._serving.is_over and (fault := overtaking_of(self._buckets)):
            self._serving.fail(fault)
        self._serving.close()
