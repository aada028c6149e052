"""What a script may have done wrong with gradients and weights, when it calls step()."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.ps._bucket import Bucket
from thalweg.ps._parameters import served
from thalweg.ps._rules import Group
from thalweg.ps._some import some

# What follows the name of a parameter.
USED_TOO_EARLY = (
    "was used before its new weights were here, by other code than the forward() of the module "
    "that has it: call wait() before, or do without overlap"
)
PUSHED_TWICE = (
    "got another gradient before step(), when its first one had been pushed: call step() after "
    "each backward pass, and put all passes of a step but the last into `with "
    "optimizer.accumulate():`. In a pass whose gradients are thrown away, such as that of a "
    "generator through its discriminator, the module is frozen, or the pass is put into no_sync() "
    "or accumulate(), after zero_grad()"
)
OTHER_SETTINGS = (
    "a group's settings have changed between backward() and step(), when the shards had used the "
    "former ones: change them before backward(), or after step()"
)


def scaled(scale: float) -> str:
    """Returns that gradients carry this loss scale, which nobody would undo."""
    return (
        f"gradients carry a loss scale of {scale:g}, which ServerOptimizer only undoes with "
        "loss_scaling=True"
    )


def fault_of(buckets: Sequence[Bucket]) -> str:
    """Returns why these gradients cannot be a step's; empty: they can."""
    missing = [name for bucket in buckets for name in bucket.missing()]
    if missing:
        return (
            f"{some(missing)} got no gradient in this step: shards update all parameters that "
            "required one when ServerOptimizer was made: freeze others before, or make it with "
            "find_unused_parameters=True"
        )
    overwritten = [name for bucket in buckets for name in bucket.overwritten()]
    if overwritten:
        return (
            f"{some(overwritten)} got another gradient after it was pushed: is the model in "
            "DistributedDataParallel? ServerOptimizer takes its place"
        )
    return ""


def change_of(buckets: Sequence[Bucket]) -> str:
    """Returns which weights have been changed between two steps; empty: none."""
    changed = [name for b in buckets if not b.is_coming for name in b.changed()]
    if not changed:
        return ""
    return (
        f"{some(changed)} has been changed since the last step, and the shards do not know that: "
        "call publish() on all workers after changing parameters"
    )


def overtaking_of(buckets: Sequence[Bucket]) -> str:
    """Returns what weights on their way would overwrite that other code has changed; empty:
    nothing.
    """
    changed = [name for bucket in buckets for name in bucket.overtaken()]
    if not changed:
        return ""
    return (
        f"{some(changed)} has been changed while its new weights were on their way, which would "
        "take the place of that: change parameters after step(), with overlap after wait(), and "
        "call publish() on all workers then"
    )


def stranger_of(buckets: Sequence[Bucket], groups: Sequence[Group]) -> str:
    """Returns which parameters of the groups no shard would update; empty: none."""
    known = {id(each.tensor) for bucket in buckets for each in bucket.parameters}
    trained = (p for group in groups for p in group["params"] if p.requires_grad)
    if all(id(parameter) in known for parameter in trained):
        return ""
    strangers = [each.name for each in served(groups) if id(each.tensor) not in known]
    return (
        f"{some(strangers)} requires a gradient, but did not when ServerOptimizer was made, so "
        "that no shard updates it: make a new one"
    )


def freezing_of(buckets: Sequence[Bucket], groups: Sequence[Group]) -> str:
    """Returns which parameters are trained though they are not exchanged, or the other way; empty:
    none.
    """
    known = {id(each.tensor) for bucket in buckets for each in bucket.parameters}
    made = "LocalOptimizer was made: workers would not agree about it. Make a new one"
    trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    if trained - known:
        strangers = [each.name for each in served(groups) if id(each.tensor) not in known]
        return f"{some(strangers)} requires a gradient now, but did not when {made}"
    if known - trained:
        frozen = [e.name for b in buckets for e in b.parameters if id(e.tensor) not in trained]
        return f"{some(frozen)} requires no gradient any more, but did when {made}"
    return ""


@contextmanager
def failing(fail: Callable[[str], None]) -> Iterator[None]:
    """Calls `fail` with what a ValueError says: a single worker may raise it."""
    try:
        yield
    except ValueError as error:
        fail(str(error).removeprefix("thalweg: "))


def without(variable: str) -> str:
    """Returns what else there is for a script that does not mention Thalweg, to end an error."""
    if not variable:
        return ""
    return (
        f". {variable} asks for this optimizer: without it, the script trains as it is, with "
        "averaged gradients"
    )
