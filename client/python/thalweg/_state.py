"""What `thalweg.ddp.attach` returns."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from thalweg import _C, _precision, _stats, _topology


class Member(Protocol):
    """A worker's part in a job."""

    def stats(self) -> dict[str, float]: ...
    def path(self) -> str: ...
    def status(self) -> str | None: ...
    def close(self) -> None: ...


class State:
    """A DDP module's connection to Thalweg: statistics, and the means to end it.

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
        place: _topology.Placement,
    ) -> None:
        self.job = job
        self.codec = codec
        self.sidecar = sidecar
        self._ours = ours  # the sidecar was started by attach() and leaves with its last worker
        self._place = place
        self._member = member
        self._keeper = keeper  # of what the node's codec carries; None: another worker has it
        self._pid = os.getpid()
        # Runs when the object is collected and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _close, member, self._pid)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def path(self) -> str:
        """How gradients reach the sidecar (docs/gpu.md): "cpu"; "pinned" for those of a GPU, or
        "pageable" when it cannot lock the memory in which the results are; "ipc" when they stay on
        it; "workers (…)" where a node's workers reduce among themselves, with their leader's."""
        return self._member.path()

    def status(self) -> str | None:
        """None while everything works, else why it has failed."""
        return self._member.status()

    def stats(self) -> dict[str, float]:
        """Sums since attach(), of this worker and its node.

        rounds (buckets), raw_bytes (gradients this worker handed over), wire_bytes_sent and
        wire_bytes_received (by its node), compression (raw_bytes / wire_bytes_sent),
        nonfinite_elems, skipped_steps (by loss scalers of this process, torch's or thalweg.amp's),
        and *_seconds: copy (this worker), wait, reduce, decode, wire (the node), total.

        Not sums: compressed_since (the iteration, counted from 1, in which compression began; 0:
        not yet), the latest samples of error_ratio (what was lost of a gradient, relative to it)
        and residual_norm (of what is left for later), and loss_scale (the smallest; 0: none yet).
        A GPU's loss_scale and skipped_steps are known when a later step looks, or this does.
        """
        _precision.settle()
        stats = self._member.stats()
        stats["compression"] = _stats.ratio(stats["raw_bytes"], stats["wire_bytes_sent"])
        return stats

    def summary(self) -> str:
        """The statistics for people."""
        return _stats.describe(self.codec, self.stats(), self.path)

    def state_dict(self) -> dict[str, Any]:
        """What the codec carries from step to step, for a checkpoint.

        Call it on all workers, between two steps, and keep every worker's own, as
        torch.distributed.checkpoint does: "codec" is the same everywhere, "nodeN" are bytes that
        one worker of each node has. Raises RuntimeError.
        """
        result: dict[str, Any] = {"codec": self.codec}
        if self._keeper is not None:
            result[self._node_key] = self._keeper.save_codec_state()
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was made; bit for bit if model and optimizer do, too.

        Call it on all workers, with each its own, before the first step. The job needs as many
        nodes as then. Raises ValueError when the state is of another codec or node.
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
    if os.getpid() == pid:  # a forked child must leave its parent's session alone
        with contextlib.suppress(RuntimeError):
            member.close()
