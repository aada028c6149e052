"""What rank 0, or a node's first worker, is told of an attached module."""

from __future__ import annotations

import logging

from torch.nn.parallel import DistributedDataParallel

from thalweg._attach import _left_behind, _model
from thalweg._attach._jobs import AttachedModule
from thalweg._attach._state import State
from thalweg._job._topology import Introduction

_log = logging.getLogger("thalweg")


def remark(ddp_model: DistributedDataParallel, state: State, me: Introduction, rank: int) -> None:
    """Says what was asked for and does not happen: that of a node once, the rest on rank 0."""
    place, remarks = state._place, list[str]()
    if place.local_rank == 0:
        remarks += state._left_out.remarks
    if rank == 0:
        compresses = place.num_nodes > 1 and not state._left_out.everything
        attached = AttachedModule(ddp_model, state)
        owner = _left_behind.Owner(state.job, me.codec, compresses, attached.goes_on_beside)
        remarks += _left_behind.own(_model.parameters(ddp_model), owner, ddp_model)
    if rank == 0 and (delayed := _model.delayed(ddp_model)):
        remarks.append(
            f"gradients of {len(delayed)} parameters ({delayed[0]}{', …' if delayed[1:] else ''}) "
            "do not come here: they are in delay_all_reduce_named_params, which torch averages by "
            "itself, uncompressed"
        )
    if rank == 0 and me.min_nodes and place.num_nodes > 1 and _broadcasts(ddp_model):
        remarks.append(
            "each forward pass fails after a node is lost, in spite of THALWEG_MIN_NODES: it "
            "broadcasts the module's buffers over the process group; build DistributedDataParallel "
            "with broadcast_buffers=False"
        )
    if me.residuals and not state.has_residual_files and rank == 0:
        why = f"with codec {me.codec}" if place.num_nodes > 1 else "on a single node"
        remarks.append(
            f"THALWEG_RESIDUALS (residuals=) has no effect: {why} nothing is held back that files "
            "can keep"
        )
    for text in remarks:
        _log.warning("job %s: %s", state.job, text)


def _broadcasts(ddp_model: DistributedDataParallel) -> bool:
    """Returns whether torch sends the module's buffers from rank 0 to the others."""
    return bool(ddp_model.broadcast_buffers and ddp_model.modules_buffers)
