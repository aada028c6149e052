"""Defines what `thalweg.ddp.attach` returns."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from thalweg import _C, _precision, _stats, _topology
from thalweg._left_out import LeftOut


class Member(Protocol):
    """A worker's part in a job."""

    def stats(self) -> dict[str, float]: ...
    def path(self) -> str: ...
    def placement(self) -> str: ...
    def status(self) -> str | None: ...
    def close(self) -> None: ...


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
        ours: bool,
        listens: bool,
        shards: str,
        place: _topology.Placement,
        left_out: LeftOut,
    ) -> None:
        self.job = job
        self.codec = codec
        self.sidecar = sidecar
        self.shards = shards  # how many shards of which kind; empty: the sidecar's own
        self._ours = ours  # attach() started the sidecar, which ends with its last worker
        self._listens = listens  # it was started to serve a shard to other nodes
        self._place = place
        self._left_out = left_out
        self._member = member
        self._keeper = keeper  # keeps the state of the node's codec; None: another worker keeps it
        self._pid = os.getpid()
        # This runs when the object is collected or at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _close, member, self._pid)

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

    def status(self) -> str | None:
        """Returns None while everything works, else why it has failed."""
        return self._member.status()

    def stats(self) -> dict[str, float]:
        """Returns sums since attach(), of this worker and its node.

        rounds (buckets), raw_bytes (gradients that this worker submitted), wire_bytes_sent and
        wire_bytes_received (by its node), compression (raw_bytes / wire_bytes_sent),
        nonfinite_elems, skipped_steps (by loss scalers of this process, torch's or thalweg.amp's),
        and *_seconds: copy (this worker), wait, reduce, decode, wire (the node), total.

        These are not sums: compressed_since (the iteration, counted from 1, in which compression
        began; 0: not yet), the latest samples of error_ratio (the lost part of a gradient, relative
        to it) and residual_norm (norm of what is left for later), and loss_scale (the smallest; 0:
        none yet). A GPU's loss_scale and skipped_steps are updated by a later step, or by this
        call.
        """
        _precision.settle()
        stats = self._member.stats()
        stats["compression"] = _stats.ratio(stats["raw_bytes"], stats["wire_bytes_sent"])
        return stats

    def summary(self) -> str:
        """Formats the statistics for people, and with several nodes which shard sums how much, how
        long 100 MB are predicted to take, and what would help most (docs/placement.md).
        """
        path = f"{self.path}, {self.shards}" if self.shards else self.path
        placement = self._member.placement()
        return _stats.describe(self.codec, self.stats(), path, self._left_out, placement)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the codec carries from step to step, for a checkpoint.

        Call it on all workers, between two steps, and store every worker's own result, as
        torch.distributed.checkpoint does: "codec" is the same everywhere, "nodeN" are bytes that
        one worker of each node has. Raises RuntimeError.
        """
        result: dict[str, Any] = {"codec": self.codec}
        if self._keeper is not None:
            result[self._node_key] = self._keeper.save_codec_state()
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; training continues bit for bit if model and optimizer are restored
        too.

        Call it on all workers, with each worker's own state, before the first step. The job needs
        as many nodes as before. Raises ValueError when the state belongs to another codec or node.
        """
        saved = str(state_dict.get("codec", ""))
        if saved.partition(":")[0] != self.codec.partition(":")[0]:
            raise ValueError(
                f"thalweg: the state was saved with codec {saved!r}, this job uses {self.codec!r}"
            )
        if self._keeper is None:
            return
        if self._node_key not in state_dict:
            nodes = sorted(key for key in state_dict if key != "codec")
            raise ValueError(
                f"thalweg: the state has no {self._node_key!r}, only {nodes}: load what this "
                "node's first worker saved, with as many nodes"
            )
        self._keeper.load_codec_state(state_dict[self._node_key])

    @property
    def _node_key(self) -> str:
        return f"node{self._place.node}"

    def close(self) -> None:
        """Leaves the job. backward() of the DDP module fails from then on. May be called again."""
        self._finalizer()

    def __repr__(self) -> str:
        status = "closed" if self.closed else self.status() or "ok"
        return f"<thalweg.ddp.State job={self.job!r} codec={self.codec} status={status!r}>"


def _close(member: Member, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not touch its parent's session
        with contextlib.suppress(RuntimeError):
            member.close()
