"""Keeps what nodes hold back of gradients beside checkpoints that rank 0 alone writes.

Where rank 0's optimizer is asked for its state, rank 0 writes the file of its node, and a note into
the process group's store. The others look for notes before each training step, and write theirs. A
round needs rank 0, so none of them is more than one step further by then. They also write one when
they leave the job, because no step may come after the last checkpoint.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from thalweg._attach import _codec_states
from thalweg._attach._first_step import ForwardHook
from thalweg._attach._notes import Notes
from thalweg._attach._residual_files import ResidualFiles
from thalweg._job import _rendezvous

if TYPE_CHECKING:
    from thalweg._job._collectives import Meeting
    from thalweg._job._member import Job

_log = logging.getLogger("thalweg")
_keepers: weakref.WeakKeyDictionary[DistributedDataParallel, ResidualKeeper] = (
    weakref.WeakKeyDictionary()
)


class ResidualKeeper:
    """Writes the files of a node, of whose workers one has it. `whole` returns the node's state.

    Thread-safe, except for look().
    """

    def __init__(
        self,
        files: ResidualFiles,
        notes: Notes | None,
        *,
        job: str,
        node: int,
        nodes: int,
        whole: Callable[[], bytes],
    ) -> None:
        self.files = files
        self._notes = notes  # None: there is no store, or it has failed, or a node is lost
        self._job, self._node, self._nodes = job, node, nodes
        self._whole = whole
        self._kept = 0  # the step of the latest file
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._has_warned = False

    def keep(self, whole: bytes) -> dict[str, Any]:
        """Writes the state of this step, and returns what a checkpoint says of it."""
        step = _codec_states.rounds_of(whole)
        if self._write(step, whole) and self._node == 0:
            self.files.release()
            self._tell()
        return {"job": self._job, "step": step, "nodes": self._nodes}

    def look(self) -> None:
        """Writes the state of this step if rank 0 has written a checkpoint since the last call.

        It must not be called while a backward runs.
        """
        if self._node == 0 or not self._is_told():
            return
        try:
            whole = self._whole()
        except RuntimeError as error:
            self.warn(str(error).removeprefix("thalweg: "))
        else:
            self.files.release()
            self._write(_codec_states.rounds_of(whole), whole)

    def close(self) -> None:
        """Writes what the node leaves the job with; rank 0 has written it with each checkpoint."""
        if self._node != 0:
            try:
                whole = self._whole()
            except RuntimeError:  # the job has failed, or ends in the middle of a step
                pass
            else:
                self._write(_codec_states.rounds_of(whole), whole)
        with self._lock:
            self._join()

    def find(self, mark: object) -> bytes:
        """Returns the state of this node for what a checkpoint says. Raises OSError, saying why
        there is none.
        """
        if not isinstance(mark, Mapping) or not isinstance(mark.get("step"), int):
            raise OSError("the checkpoint was written without THALWEG_RESIDUALS")
        if mark.get("nodes") != self._nodes:
            raise OSError(
                f"the checkpoint was written by {mark.get('nodes')} nodes, this job has "
                f"{self._nodes}"
            )
        job, step = str(mark.get("job")), mark["step"]
        self.files.hold(job, step)  # until there is a later checkpoint
        try:
            return self.files.read(job, step)
        except OSError as error:
            raise OSError(f"node {self._node}: {error}") from None

    def _write(self, step: int, whole: bytes) -> bool:
        """Begins to write a file, unless there is one of this step or nothing to keep."""
        with self._lock:
            if step <= self._kept:
                return False
            self._kept = step
            self._join()
            try:
                self._writer = threading.Thread(
                    target=self._write_now, args=(step, whole), name="thalweg-residuals"
                )
                self._writer.start()
            except RuntimeError:  # the interpreter is about to end
                self._writer = None
                self._write_now(step, whole)
        return True

    def _write_now(self, step: int, whole: bytes) -> None:
        try:
            self.files.write(self._job, step, whole)
        except OSError as error:
            self.warn(str(error))

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _tell(self) -> None:
        try:
            if self._notes is not None:
                self._notes.write()
        except RuntimeError as error:
            self._notes = None
            self.warn(str(error))

    def _is_told(self) -> bool:
        try:
            return self._notes is not None and self._notes.are_new()
        except RuntimeError as error:
            self._notes = None
            self.warn(str(error))
            return False

    def warn(self, why: str) -> None:
        """Says once that the node keeps nothing."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "job %s: node %d does not keep what it holds back of gradients in %s, which begins "
                "at zero where a checkpoint is resumed: %s",
                self._job,
                self._node,
                self.files.folder,
                why,
            )


def keeper_of(
    module: DistributedDataParallel, job: Job, meeting: Meeting, folder: str
) -> ResidualKeeper:
    """Returns the keeper of this node, which looks for notes before each training step of the
    module.
    """
    session = job.session
    assert session is not None
    notes, problem = None, ""
    try:
        notes = Notes(
            meeting.shared or _rendezvous.default_store(),
            job.name,
            timeout=meeting.timeout,
            lost=session.lost_nodes,
            status=session.status,
        )
    except RuntimeError as error:
        problem = str(error).removeprefix("thalweg: ")
    keeper = ResidualKeeper(
        ResidualFiles(folder, job.place.node),
        notes,
        job=job.name,
        node=job.place.node,
        nodes=job.place.num_nodes,
        whole=session.save_codec_state,
    )
    if problem:
        keeper.warn(problem)
    _keepers[module] = keeper
    module.register_forward_pre_hook(ForwardHook(_look))
    return keeper


def _look(module: DistributedDataParallel) -> None:
    keeper = _keepers.get(module)
    if keeper is not None and torch.is_grad_enabled() and module.require_backward_grad_sync:
        keeper.look()
