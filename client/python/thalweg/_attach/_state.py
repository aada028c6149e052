"""Defines what `thalweg.ddp.attach` returns."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from thalweg import _C
from thalweg._attach import _codec_states, _left_out, _residuals, _savings, _stats
from thalweg._attach._lost_workers import LostWorkers
from thalweg._job import _topology
from thalweg._torch import _precision

_log = logging.getLogger("thalweg")


class Member(Protocol):
    """A worker's part in a job."""

    def stats(self) -> dict[str, float]: ...
    def path(self) -> str: ...
    def placement(self) -> str: ...
    def lost_nodes(self) -> list[str]: ...
    def status(self) -> str | None: ...
    def close(self) -> None: ...


class _Ending(NamedTuple):
    """What is to be done when a State ends."""

    job: str
    member: Member
    size: _savings.Size | None  # None: another worker says what the job has saved
    residuals: _residuals.ResidualKeeper | None
    lost: LostWorkers | None


class State:
    """A DDP module's connection to Thalweg: it gives statistics and can be closed.

    It lives as long as the DDP module unless it is closed before. Thread-safe.
    """

    def __init__(
        self,
        member: Member,
        *,
        keeper: _C.Session | None,
        job: str,
        codec: str,
        sidecar: str,
        starts_sidecars: bool,
        listens: bool,
        shards: str,
        place: _topology.Placement,
        left_out: _left_out.LeftOut,
        workers: int,
        rides: bool = False,
        has_residual_files: bool = False,
        residuals: _residuals.ResidualKeeper | None = None,
        min_nodes: int = 0,
        counted: int = 0,
    ) -> None:
        """`counted` is what `member` counts instead of the workers, unless 0."""
        self.job = job
        self.codec = codec
        self.sidecar = sidecar
        self.shards = shards  # how many shards of which kind; empty: the sidecar's own
        self._starts_sidecars = starts_sidecars  # the sidecar ends with its last worker
        self._listens = listens  # it was started to serve a shard to other nodes
        self._place = place
        self._left_out = left_out
        self._workers = workers  # of the whole job
        self.rides = rides  # an optimizer's checkpoint has what the codec has on all nodes alike
        self.has_residual_files = has_residual_files  # on all nodes
        self.residuals = residuals  # None: no files, or another worker keeps those of the node
        self.has_loaded = False  # load_state_dict() was called
        self.has_trained = False  # the first training step has begun
        self.became_nonfinite: Any = 0  # elements of results, in a shorter type or multiplied
        self._rode: dict[str, Any] | None = None  # the latest that could be saved, or was loaded
        self._member = member
        self._keeper = keeper  # keeps the state of the node's codec; None: another worker keeps it
        self._pid = os.getpid()
        # This runs when the object is collected or at exit, whichever comes first.
        size = _savings.Size(place.num_nodes, workers)
        speaks = place.node == place.local_rank == 0
        count = self._count = functools.partial(_count, member, workers, counted or workers)
        self._lost = LostWorkers(job, workers, count, member.lost_nodes) if min_nodes else None
        ending = _Ending(job, member, size if speaks else None, residuals, self._lost)
        self._finalizer = weakref.finalize(self, _close, ending, self._pid)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def path(self) -> str:
        """Returns how gradients reach the sidecar (docs/gpu.md).

        "cpu"; "pinned" for those of a GPU, or "pageable" when it cannot lock the memory of the
        results; "ipc" when they stay on the GPU; "workers (…)" when a node's workers reduce among
        themselves, with the leader's path.
        """
        return self._member.path()

    @property
    def local_size(self) -> int:
        """Returns the number of workers on this node."""
        return self._place.local_size

    def status(self) -> str | None:
        """Returns None while everything works, else why it has failed."""
        return self._member.status()

    def stats(self) -> dict[str, float]:
        """Returns sums since attach(), of this worker and its node.

        rounds (buckets), raw_bytes (gradients that this worker submitted), wire_bytes_sent and
        wire_bytes_received (by its node), link_bytes_sent (that have left the node: without what
        went to its own shard, with what that has sent to other nodes), compression (raw_bytes /
        wire_bytes_sent), nonfinite_elems, skipped_steps (by loss scalers of this process, torch's
        or thalweg.amp's), sidecar_returns (times that a new process of the sidecar has taken up the
        job), and *_seconds: copy (this worker), wait, reduce, decode, wire (the node), total.

        These are not sums: compressed_since (the iteration, counted from 1, in which compression
        began; 0: not yet), the latest samples of error_ratio (the lost part of a gradient, relative
        to it) and residual_norm (norm of what is left for later), loss_scale (the smallest; 0: none
        yet), and workers, over which the last gradients are the mean. A GPU's loss_scale and
        skipped_steps are updated by a later step, or by this call.
        """
        _precision.settle()
        stats = _precision.shown(self._member.stats())
        stats["nonfinite_elems"] += int(self.became_nonfinite)
        stats["workers"] = self._count()
        stats["compression"] = _stats.ratio(stats["raw_bytes"], stats["wire_bytes_sent"])
        return stats

    def on_loss(self, listener: Callable[[int], None]) -> None:
        """Calls `listener` with the number of workers that are left when nodes were lost.

        That happens before an optimizer's step with gradients that are the mean over so many: the
        listener may set the learning rate for it. Without `min_nodes` it never does.
        """
        if self._lost is not None:
            self._lost.tell(listener)

    def lost_nodes(self) -> list[str]:
        """Returns the nodes without which the job goes on, each with the reason, up to 4 s late."""
        return self._member.lost_nodes()

    def summary(self) -> str:
        """Formats the statistics for people, a line each (docs/summary.md); with several nodes also
        which shard sums how much, how long 100 MB are predicted to take, and what would help most.
        """
        path = f"{self.path}, {self.shards}" if self.shards else self.path
        placement = self._member.placement()
        return _stats.describe(self.codec, self.stats(), path, self._left_out, placement)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the codec carries from step to step, for a checkpoint.

        Call it between two steps, on all workers if what nodes hold back of gradients is to be
        kept, and store every worker's own result, as torch.distributed.checkpoint does: "codec" and
        "saved_by" are the same everywhere, "nodeN" are bytes that one worker of each node has. A
        result of rank 0 alone has the codec's step counts and factors, and what its node holds
        back. Raises RuntimeError.
        """
        result: dict[str, Any] = {"codec": self.codec, "saved_by": self._size}
        if self._keeper is not None:
            result[self._node_key] = self._keeper.save_codec_state()
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; training continues bit for bit if model and optimizer are restored
        too.

        Call it on all workers before the first step, with each worker's own state or with that of
        rank 0. Where the state has nothing of this node, or was saved by another number of nodes or
        workers, step counts and factors go on, and what nodes hold back begins at zero, which the
        log says. Raises ValueError when the state belongs to another codec.
        """
        saved = str(state_dict.get("codec", ""))
        if saved.partition(":")[0] != self.codec.partition(":")[0]:
            raise ValueError(
                f"thalweg: the state was saved with codec {saved!r}, this job uses {self.codec!r}"
            )
        self.has_loaded = True
        if self._keeper is None:
            return
        nodes = {k: v for k, v in state_dict.items() if k[:4] == "node" and k[4:].isdecimal()}
        if not nodes:
            raise ValueError(
                f"thalweg: the state has nothing of any node, only {sorted(state_dict)}: load what "
                "state_dict() has returned on rank 0, or on this node's first worker"
            )
        lost = self._what_is_lost(state_dict, nodes)
        mine: bytes = nodes.get(self._node_key, next(iter(nodes.values())))
        self._keeper.load_codec_state(_codec_states.without_residuals(mine) if lost else mine)
        if lost and (self._node_key not in nodes or self._place.node == 0):
            _log.warning(
                "job %s: %s: the codec's step counts and factors go on, and what is held back of "
                "gradients begins at zero",
                self.job,
                lost,
            )

    def _what_is_lost(self, saved: Mapping[str, Any], nodes: Mapping[str, bytes]) -> str:
        """Returns why this node cannot take what it held back from a state; empty: it can."""
        then = saved.get("saved_by", self._size)
        if then != self._size:
            return f"the codec's state was saved by {then}, this job has {self._size}"
        if self._node_key not in nodes:
            return (
                f"the codec's state is that of {' and '.join(nodes)} alone, and this is "
                f"{self._node_key} (state_dict() on all workers, each result stored, has all)"
            )
        return ""

    def riding(self) -> dict[str, Any] | None:
        """Returns what rides in an optimizer's checkpoint; None: there is nothing to keep, or
        another worker has it. Of a job that has failed it is what the last checkpoint had.
        """
        if self._keeper is None or self.closed or not self.rides:
            return None
        try:
            whole = self._keeper.save_codec_state()
        except RuntimeError as error:
            has = "has an earlier one's" if self._rode else "is without"
            text = "job %s: an optimizer's checkpoint %s step counts of the codec: %s"
            _log.warning(text, self.job, has, error)
            return self._rode
        self._rode = {"codec": self.codec, "shared": _codec_states.without_residuals(whole)}
        if self.residuals is None:
            return self._rode
        return self._rode | {"residuals": self.residuals.keep(whole)}

    def ride_on(self, riding: Mapping[str, Any], held_back: bytes | None) -> str:
        """Goes on from what rode in an optimizer's checkpoint, and from what this node has held
        back, where it is known. Returns why it cannot, or "".
        """
        saved = str(riding.get("codec", ""))
        if saved.partition(":")[0] != self.codec.partition(":")[0]:
            return f"it was saved with codec {saved}, this job uses {self.codec}"
        if not self.rides:
            return "this job compresses nothing"
        try:
            shared = _codec_states.without_residuals(riding["shared"])
            if held_back is not None:
                shared = _codec_states.with_residuals(shared, held_back)
        except ValueError as error:
            return str(error).removeprefix("thalweg: ")
        if self._keeper is not None:
            self._keeper.load_codec_state(shared)
            self._rode = {"codec": self.codec, "shared": riding["shared"]}
        return ""

    @property
    def _size(self) -> str:
        return f"{self._workers} workers on {self._place.num_nodes} nodes"

    @property
    def _node_key(self) -> str:
        return f"node{self._place.node}"

    def close(self) -> None:
        """Leaves the job. backward() of the DDP module fails from then on. May be called again.

        The job of a process group of the back end "thalweg" goes on until the group is destroyed,
        and with it the module's averages. Destroying the group calls this.
        """
        self._finalizer()

    def __repr__(self) -> str:
        status = "closed" if self.closed else self.status() or "ok"
        return f"<thalweg.ddp.State job={self.job!r} codec={self.codec} status={status!r}>"


def _count(member: Member, workers: int, counted: int) -> int:
    """Returns over how many of the job's workers the last gradients are the mean."""
    return int(member.stats()["workers"]) * workers // counted


def _close(ending: _Ending, pid: int) -> None:
    if os.getpid() != pid:  # a forked child must not touch its parent's session
        return
    job, member, size, residuals, lost = ending
    if lost is not None:
        lost.close()
    if size is not None and member.status() is None:
        _savings.farewell(job, member.stats, member.placement, size)
    if residuals is not None and member.status() is None:
        residuals.close()
    with contextlib.suppress(RuntimeError):
        member.close()
