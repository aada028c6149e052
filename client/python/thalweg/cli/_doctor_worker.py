"""Runs a script for some steps as a worker of `thalweg doctor SCRIPT`, and says what was activated.

    python -m thalweg.cli._doctor_worker REPORT STEPS RATE SCRIPT ARGS

Rank 0 writes the lines of its report to the file REPORT, as JSON; so does another rank on which the
script fails before there is one. RATE is that of the links in bits per second, for which the report
says how seldom to exchange; 0: it does not.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg import _backend, ddp
from thalweg._activation import _local_updates, _served, _sharded
from thalweg._attach import _model, _stats
from thalweg._settings import _variables
from thalweg._settings._config import Activation, ConfigError, LocalUpdates, Served
from thalweg.cli import _local_advice, _script
from thalweg.optim._counts import fallbacks, fused_steps
from thalweg.ps import LocalOptimizer, ServerOptimizer

T = TypeVar("T")


class Line(NamedTuple):
    """A line of the report. `level`: ok, note, warn or FAIL."""

    level: str
    text: str


class _Warnings(logging.Handler):
    """Keeps what Thalweg's logger warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> int:
    report, wanted, rate, *command = sys.argv[1:]
    warnings = _Warnings()
    logging.getLogger("thalweg").addHandler(warnings)
    ended: list[float] = []  # the steps so far

    def after(number: int) -> None:
        ended.append(time.perf_counter())
        if number == int(wanted):
            raise _script.Done

    steps = _script.Steps(after)
    error = ""
    try:
        _script.run(command)
        lines = _look(steps.count, int(wanted), float(rate))
    except _script.Done:
        lines = _look(
            steps.count, int(wanted), float(rate)
        )  # the script's frames, and its modules, still live
        lines += _of_links(float(rate), ended)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever it is, it is reported
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
        where = "" if _rank() == 0 else f"on rank {_rank()} "
        lines = [Line("FAIL", f"{where}the script ends after {steps.count} steps with {error}")]
    steps.close()
    lines += [Line("warn", text) for text in dict.fromkeys(warnings.texts)]
    if _rank() == 0 or error:
        _write(Path(report), lines)
    gc.collect()  # DDP's modules, which are in cycles, keep Gloo's threads
    if dist.is_initialized() and not error:
        dist.destroy_process_group()
    return 1 if error else 0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _write(report: Path, lines: Sequence[Line]) -> None:
    """Writes the report whole or not at all: once another worker has failed, this one may be killed
    at any time, and so may rank 0 before it has written its own, which replaces another rank's.
    """
    own = report.with_suffix(f".{_rank()}")
    own.write_text(json.dumps(lines), encoding="utf-8")
    if _rank() == 0:
        own.replace(report)
        return
    with contextlib.suppress(FileExistsError):
        report.hardlink_to(own)


def _look(steps: int, wanted: int, rate: float) -> list[Line]:
    """Returns what has become of the environment's wishes and of the modules that there are.

    Where nothing asks for Thalweg, a rate asks for advice alone, and nothing has failed.
    """
    modules, optimizers = _alive(DistributedDataParallel), _alive(Optimizer)
    level, why = ("ok", "") if steps >= wanted else ("FAIL", f", before {wanted} were made")
    lines = [Line(level, f"the script has made {steps} steps of its optimizer{why}")]
    activation = Activation.from_env()
    others = _of_others(optimizers)
    lines += [
        Line("FAIL", f"the variable {name} means nothing{like}")
        for name, like in _variables.misspelt()
    ]
    found = [_of_module(module, activation) for module in modules] + others
    found = found or [_without_modules(optimizers, activation)]
    averaging, fused = _asking_for_averages(activation), activation.fused_optimizer
    by_script = bool(others) or any(ddp.state_of(module) for module in modules) or _is_ours()
    if not averaging and not by_script and (fused or rate):
        found = [Line("note", line.text) for line in found]
    if variables := [*averaging, *([fused] if fused else [])]:
        lines.append(Line("ok", f"variables ask for Thalweg: {', '.join(variables)}"))
        if _variables.autoload_is_off() and not by_script:
            text = f"{_variables.AUTOLOAD} is not 1, so that they do nothing without code: unset it"
            lines.append(Line("FAIL", text))
    elif by_script:
        lines.append(Line("ok", "the script asks for Thalweg itself"))
    else:
        lines.append(Line("note" if rate else "FAIL", _nothing_asks()))
    return [*lines, *found, *([_of_fused()] if fused else [])]


def _alive(kind: type[T]) -> list[T]:
    """Returns the objects of that class; type(), unlike isinstance(), asks none of the others."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _asking_for_averages(activation: Activation) -> list[str]:
    """Returns NAME=value of the variables that leave it to Thalweg to average."""
    served, local = Served.from_env(), LocalUpdates.from_env()
    asking = [*activation.variables] if activation.codec else []
    asking += served.variables if served.kind else ()
    asking += local.variables if local.every else ()
    by_group = _variables.backend_is_wanted()
    return asking + (_variables.assignments(["THALWEG_BACKEND"]) if by_group else [])


def _nothing_asks() -> str:
    if _variables.is_off():
        return "nothing asks for Thalweg: THALWEG_ENABLE=0 switches all variables off"
    return "nothing asks for Thalweg: set THALWEG_CODEC, or call thalweg.ddp.attach()"


def _is_ours(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the process group, by default the default one, has our back end."""
    return dist.is_initialized() and dist.get_backend(group) == _backend.NAME


def _of_module(module: DistributedDataParallel, activation: Activation) -> Line:
    name = f"DistributedDataParallel({type(module.module).__name__})"
    if _served.optimizer_of(module) is not None:
        return Line("ok", f"{name} leaves its gradients to its optimizer, which is on the shards")
    if _local_updates.optimizer_of(module) is not None:
        return Line("ok", f"{name} leaves its gradients to its optimizer, which does local updates")
    state = ddp.state_of(module)
    if state is None and not activation.codec and _is_ours(module.process_group):
        return Line("ok", f"{name} leaves its gradients to its process group, which is Thalweg's")
    if state is None:
        return Line("FAIL", f"{name} is not attached: {_why_not(module, activation)}")
    stats = state.stats()
    attached = f"{name} is attached as {state.job} with codec {state.codec}"
    if not stats["rounds"]:
        return Line(
            "FAIL",
            f"{attached}, but no gradient has reached it: does every backward pass run under "
            "no_sync(), or through model.module?",
        )
    sent = stats["wire_bytes_sent"]
    less = _stats.compared(stats["raw_bytes"] * state.local_size, sent)
    size = f"{stats['raw_bytes'] * state.local_size / 1e6:.3g} MB of its node's gradients"
    return Line("ok", f"{attached}: {size} were sent as {sent / 1e6:.3g} MB{less}")


def _why_not(module: DistributedDataParallel, activation: Activation) -> str:
    if hook := _model.hook_of(module):
        return f"its communication hook {hook} wins over variables; remove it to use Thalweg"
    if dist.get_world_size(module.process_group) == 1:
        return "its process group has one worker, which has nothing to average"
    if not activation.codec:
        return "neither variables nor the script ask for it"
    return _model.why_not(module, activation.min_nodes) or (
        "no forward pass in training mode has gone through it: does the script call model.module, "
        "or leave the module in eval()?"
    )


def _of_others(optimizers: Sequence[Optimizer]) -> list[Line]:
    """Returns what there is of models without DistributedDataParallel that use Thalweg."""
    lines = [_of_served(one) for one in optimizers if isinstance(one, ServerOptimizer)]
    lines += [_of_local(one) for one in optimizers if isinstance(one, LocalOptimizer)]
    if "thalweg._sharded._state" in sys.modules:  # torch's FSDP takes seconds to load
        from thalweg._sharded._state import Compression

        lines += [
            Line(
                "ok",
                f"shards of fully_shard() are sent compressed: gradients in {one.codec}, "
                f"parameters in {one.gather}",
            )
            for one in _alive(Compression)
        ]
    return lines


def _of_links(rate: float, ended: Sequence[float]) -> list[Line]:
    """Returns how seldom to exchange over links of that rate, if steps ended at these times."""
    if not rate or len(ended) < 2:
        return []
    groups = [group for one in _alive(Optimizer) for group in one.param_groups]
    trained = {id(p): p.nbytes for group in groups for p in group["params"] if p.requires_grad}
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    step = (ended[-1] - ended[0]) / (len(ended) - 1)
    return [Line("note", _local_advice.describe(sum(trained.values()), step, nodes, rate))]


def _of_local(optimizer: LocalOptimizer) -> Line:
    size = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    return Line(
        "ok",
        f"LocalOptimizer exchanges what has changed of {size / 1e6:.3g} MB every "
        f"{optimizer.every} steps",
    )


def _of_served(optimizer: ServerOptimizer) -> Line:
    stats = optimizer.stats()
    if not stats["rounds"]:
        return Line("FAIL", "ServerOptimizer has pushed no gradient: has no backward pass run?")
    pushed = f"{stats['raw_bytes'] / 1e6:.3g} MB of gradients"
    return Line("ok", f"ServerOptimizer has pushed this worker's {pushed} to the shards")


def _of_fused() -> Line:
    """Returns which optimizers of torch's run fused."""
    if fused_steps:
        return Line("ok", f"torch's optimizers that run fused: {', '.join(fused_steps)}")
    why = "; ".join(fallbacks) or "the script makes no step of torch's SGD, Adam or AdamW"
    return Line("FAIL", f"no optimizer runs fused: {why}")


def _without_modules(optimizers: Sequence[Optimizer], activation: Activation) -> Line:
    if not activation.codec and _is_ours():
        text = "there is no DistributedDataParallel module; the process group is Thalweg's"
        return Line("ok", text)
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if kinds := _sharded.kinds(parameters):
        return Line(
            "FAIL",
            f"there is no DistributedDataParallel module; parameters are sharded "
            f"({' and '.join(kinds)}), and nothing compresses their gradients (docs/fsdp.md)",
        )
    group = (
        "and no process group: each worker trains by itself"
        if not dist.is_initialized()
        else "which the variables and attach() are for: wrap the model, or what else averages?"
    )
    return Line("FAIL", f"there is no DistributedDataParallel module, {group}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"thalweg: {error}")
