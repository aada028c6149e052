"""What the scripts of this folder share: `SCRIPT.py PHASE FOLDER` trains as users of a library do.

The phase `first` trains with plain DDP, with codec fp32, and with PowerSGD until a checkpoint;
`second`, in other processes, goes on from there. `killed` does both, but in its first attempt
rank 1 dies when it goes on; then it trains as long without a break. Each writes what it has seen
to PHASE<rank>.json.
"""

import gc
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

POWERSGD = "powersgd:rank=1,start=4"
SAVED_AT, ENDS_AT = 8, 10  # steps


class Task(NamedTuple):
    """One training. `folder` holds its checkpoint."""

    steps: int
    folder: Path
    saves: bool = False
    resumes: bool = False


class Layers(torch.nn.Sequential):
    """A model with a forward() of its own, as users' models have one: torch.compile() leaves out a
    wrapped module whose forward() is torch's.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(inputs)
        return outputs


def layers() -> torch.nn.Module:
    """Returns a small model, the same in every call."""
    torch.manual_seed(1)
    return Layers(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))


def data(batches: int = 64) -> torch.utils.data.TensorDataset:
    """Returns float32 samples for so many batches of two samples on each of two workers, the same
    in every call.
    """
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(torch.randn(4 * batches, 64, generator=generator))


def seen(module: torch.nn.Module) -> dict[str, Any]:
    """Returns what has become of a DistributedDataParallel module, or of one that holds it."""
    while not isinstance(module, DistributedDataParallel):
        module = module._orig_mod  # torch.compile's
    digest = hashlib.sha256()
    for parameter in module.parameters():
        assert parameter.isfinite().all()
        digest.update(parameter.detach().numpy().tobytes())
    ddp = sys.modules.get("thalweg.ddp")
    state = ddp and ddp.state_of(module)
    stats = state.stats() if state else {}
    return {
        "digest": digest.hexdigest(),
        "codec": state.codec if state else None,
        "raw": stats.get("raw_bytes", 0),
        "sent": stats.get("wire_bytes_sent", 0),
    }


def main(train: Callable[[Task], dict[str, Any]]) -> None:
    """`train` returns seen() of the module that it has trained."""
    phase, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv = sys.argv[:1]
    torch.set_num_threads(1)
    results = {}
    saving = Task(SAVED_AT, folder / "saved", saves=True)
    going_on = Task(ENDS_AT, folder / "saved", resumes=True)
    if phase == "killed" and not (folder / "died").exists():
        with_codec(POWERSGD, lambda: train(saving))
        dist.barrier()  # rank 0 has written the checkpoint
        if dist.get_rank() == 1:
            die_after_a_step(folder / "died")
    if phase == "first":
        results["plain"] = with_codec("", lambda: train(Task(6, folder / "plain")))
        results["fp32"] = with_codec("fp32", lambda: train(Task(6, folder / "fp32")))
        results["saves"] = with_codec(POWERSGD, lambda: train(saving))
    else:
        results["resumes"] = with_codec(POWERSGD, lambda: train(going_on))
    if phase == "killed":
        os.environ.pop("THALWEG_RESIDUALS", None)  # the folder is one training's alone
        results["whole"] = with_codec(POWERSGD, lambda: train(Task(ENDS_AT, folder / "whole")))
    report(phase, folder, results)


def await_residuals(folder: Path, step: int, seconds: float = 60) -> str:
    """Waits until both nodes have files of what they held back after the step, or after the next
    one, and returns their names; empty: they have none in so many seconds.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [path for s in (step, step + 1) for path in folder.glob(f"*-{s}-node*.residuals")]
        if len({path.stem.rpartition("-")[2] for path in found}) == 2:
            return " ".join(path.stem for path in found)
        time.sleep(0.01)
    return ""


def die_after_a_step(note: Path, *, later: int = 0) -> None:
    """Kills this worker in the next step of an optimizer, or so many steps later, and then not
    before both nodes have files of what they held back; the note has their names.
    """
    steps, folder = itertools.count(), os.environ.get("THALWEG_RESIDUALS") if later else None

    def die(*_: object) -> None:
        # A node that has begun this step before the checkpoint was written looks in the next one.
        if next(steps) >= later:
            files = await_residuals(Path(folder), later, seconds=1) if folder else ""
            if files or not folder:
                note.write_text(files, encoding="ascii")
                os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(die)


def report(phase: str, folder: Path, results: dict[str, Any]) -> None:
    """Writes what this worker has seen, and ends the process group."""
    name = f"{phase}{dist.get_rank()}.json"
    (folder / name).write_text(json.dumps(results), encoding="utf-8")
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def with_codec(codec: str, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Trains with that THALWEG_CODEC, which is read when a module is wrapped; empty: with none."""
    os.environ["THALWEG_CODEC"] = codec
    result = train()
    gc.collect()  # the training's job ends, as it does with its process
    return result
