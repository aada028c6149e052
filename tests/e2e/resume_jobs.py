"""Jobs that save and resume as trainers do: `resume_jobs.py NAME OUT`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import job, main, outcome
from powersgd_jobs import Net, step
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

CODEC = "powersgd:rank=2,start=4"
SAVED_AFTER = 8


class Training:
    """A model with its optimizer, attached explicitly, or by the environment if `codec` is None."""

    def __init__(
        self,
        codec: str | None = CODEC,
        group: dist.ProcessGroup | None = None,
        residuals: Path | None = None,
    ) -> None:
        torch.manual_seed(7)
        self.model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if codec is not None:
            thalweg.ddp.attach(self.model, codec, residuals=residuals)
        self.steps = 0
        self.sent = 0.0

    @property
    def state(self) -> thalweg.ddp.State:
        state = thalweg.ddp.state_of(self.model)
        assert state is not None
        return state

    def train(self, steps: int) -> list[float]:
        """Returns the bytes that the node sent in each step."""
        sent = []
        for _ in range(steps):
            step(self.model, self.optimizer, self.steps)
            self.steps += 1
            before, self.sent = self.sent, self.state.stats()["wire_bytes_sent"]
            sent.append(self.sent - before)
        return sent

    def save(self, path: Path, *, state: bool) -> None:
        """Writes a checkpoint on rank 0 alone."""
        if dist.get_rank() == 0:
            saved = {"model": self.model.module.state_dict(), "optim": self.optimizer.state_dict()}
            if state:
                saved["thalweg"] = self.state.state_dict()
            torch.save(saved, path)
        dist.barrier()

    def load(self, path: Path, *, optimizer: bool = True) -> dict[str, Any]:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(saved["model"])
        if optimizer:
            self.optimizer.load_state_dict(saved["optim"])
        self.steps = SAVED_AFTER
        return saved


def path() -> Path:
    return Path(os.environ["TMPDIR"]) / f"checkpoint-{os.environ['MASTER_PORT']}"


def finish(result: dict[str, Any], *trainings: Training) -> dict[str, Any]:
    for training in trainings:
        training.state.close()
    dist.barrier()
    if dist.get_rank() == 0:
        path().unlink()
    return result


@job
def ordinary() -> dict[str, Any]:
    """Saves model and optimizer on rank 0, and resumes from that; beside it, without Thalweg."""
    first = Training()
    straight = first.train(SAVED_AFTER)
    first.save(path(), state=False)
    straight += first.train(3)
    second = Training()
    second.load(path())
    resumed = second.train(3)
    plain = torch.optim.AdamW(Net().parameters())
    plain.load_state_dict(torch.load(path(), weights_only=True)["optim"])
    saved = torch.load(path(), weights_only=True)["optim"]
    carried = sum(len(one["shared"]) for one in saved["thalweg"])
    gradient = 4 * sum(p.numel() for p in first.model.parameters())
    return finish(
        {
            "straight": straight,
            "resumed": resumed,
            "share": carried / gradient,
            "keys": sorted(plain.state_dict()),
        },
        first,
        second,
    )


@job
def one_comes_late() -> dict[str, Any]:
    """Resumes, with another rank that comes to its first step when the first has warned of it,
    which is later than THALWEG_TIMEOUT.
    """
    store = dist.distributed_c10d._get_default_store()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "rank 1 has not come to the first" in record.getMessage():
                store.set("warned", "")

    first = Training()
    straight = first.train(SAVED_AFTER)
    first.save(path(), state=False)
    second = Training()
    second.load(path())
    if dist.get_rank() == 0:
        logging.getLogger("thalweg").addHandler(Heard())
    else:
        with contextlib.suppress(RuntimeError):  # the test looks for what was said
            store.wait(["warned"], timedelta(seconds=45))
    return finish({"straight": straight, "resumed": second.train(3)}, first, second)


@job
def by_the_environment() -> dict[str, Any]:
    """Is a script that does not mention Thalweg, but for looking at what was sent."""
    first = Training(codec=None)
    straight = first.train(SAVED_AFTER)
    first.save(path(), state=True)
    straight += first.train(3)
    second, third = Training(codec=None), Training(codec=None)
    saved = second.load(path())
    resumed = second.train(3)
    third.load(path(), optimizer=False)
    thalweg.ddp.load_state_dict(third.model, saved["thalweg"])
    loaded = third.train(3)
    return finish(
        {"straight": straight, "resumed": resumed, "loaded": loaded}, first, second, third
    )


@job
def saved_by_rank_0() -> dict[str, Any]:
    """Loads on all ranks the state that rank 0 alone has saved."""
    first = Training()
    first.train(SAVED_AFTER)
    first.save(path(), state=True)
    second = Training()
    saved = second.load(path(), optimizer=False)
    second.state.load_state_dict(saved["thalweg"])
    return finish({"resumed": second.train(3)}, first, second)


@job
def loaded_on_rank_0_alone() -> dict[str, Any]:
    """Loads the optimizer's checkpoint on rank 0 only, as scripts do that broadcast afterwards."""
    first = Training()
    first.train(SAVED_AFTER)
    first.save(path(), state=False)
    second = Training()
    second.load(path(), optimizer=dist.get_rank() == 0)
    return finish({"resumed": second.train(6)}, first, second)


@job
def state_loaded_on_rank_0_alone() -> dict[str, Any]:
    """Loads the State that attach() returned on rank 0 only."""
    first = Training()
    first.train(SAVED_AFTER)
    first.save(path(), state=False)
    saved = first.state.state_dict()
    second = Training()
    if dist.get_rank() == 0:
        second.state.load_state_dict(saved)
    return finish({"second": outcome(lambda: second.train(1))}, first, second)


@job
def fewer_nodes() -> dict[str, Any]:
    """Saves on three nodes, each with its own state in one file, and resumes on two of them."""
    first = Training()
    first.train(SAVED_AFTER)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, first.state.state_dict())
    whole = {key: value for state in states for key, value in state.items()}
    group = dist.new_group([0, 1])
    result: dict[str, Any] = {"keys": sorted(whole)}
    if dist.get_rank() < 2:
        second = Training(group=group)
        second.state.load_state_dict(whole)
        result["resumed"] = second.train(2)
        second.state.close()
    dist.barrier()
    first.state.close()
    return result


def resume_from_files(codec: str, *, lose: str = "", blocked: bool = False) -> dict[str, Any]:
    """Saves model and optimizer on rank 0, and resumes from that and from files of residuals.

    `lose` is a pattern of files that are gone by then; `blocked`: no file can be written.
    """
    folder = path().with_name(f"{path().name}-residuals")
    if blocked and dist.get_rank() == 0:
        folder.touch()
    dist.barrier()
    first = Training(codec, residuals=folder)
    first.train(SAVED_AFTER)
    first.save(path(), state=False)
    first.train(3)
    first.state.close()
    straight = digest(first.model)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in folder.glob(lose) if lose else ():
            file.unlink()
    dist.barrier()
    second = Training(codec, residuals=folder)
    second.load(path())
    sent = second.train(3)
    second.state.close()
    dist.barrier()
    files = sorted(file.name.partition("-")[2][9:] for file in folder.glob("*"))
    plain = torch.optim.AdamW(Net().parameters())
    plain.load_state_dict(torch.load(path(), weights_only=True)["optim"])
    dist.barrier()
    if dist.get_rank() == 0:
        path().unlink()
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    return {
        "straight": straight,
        "resumed": digest(second.model),
        "sent": sent,
        "files": files,
        "keys": sorted(plain.state_dict()),
    }


@job
def with_files() -> dict[str, Any]:
    return resume_from_files(CODEC)


@job
def with_files_of_int8() -> dict[str, Any]:
    return resume_from_files("int8")


@job
def with_a_file_lost() -> dict[str, Any]:
    return resume_from_files(CODEC, lose="*node1.residuals")


@job
def with_a_folder_that_is_none() -> dict[str, Any]:
    return resume_from_files(CODEC, blocked=True)


@job
def with_nothing_to_keep() -> None:
    Training("fp16", residuals=path()).train(1)
    layer = torch.nn.Linear(64, 64)
    os.environ["THALWEG_RESIDUALS"] = str(path())
    thalweg.ps.ServerOptimizer(layer.parameters(), "sgd", codec="int8").close()


@job
def with_a_folder_on_one_node() -> dict[str, Any]:
    folder = path() if dist.get_rank() == 0 else None
    try:
        Training(residuals=folder)
    except ValueError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
