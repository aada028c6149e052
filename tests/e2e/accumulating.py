"""Adds up the gradients of several backward passes, in either way that scripts do it."""

import contextlib
from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def accumulating(ddp: DistributedDataParallel, *, by_hand: bool, is_last: bool) -> Iterator[None]:
    """Is the context of one pass; after the last one gradients are averaged."""
    if by_hand:  # as nanoGPT does
        ddp.require_backward_grad_sync = is_last
        yield
    else:
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            yield
