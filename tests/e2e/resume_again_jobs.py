"""Contains jobs that go back to an earlier state, or end early: `resume_again_jobs.py NAME OUT`."""

from __future__ import annotations

import copy
import io
import logging
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from jobs import job, main, outcome
from resume_jobs import SAVED_AFTER, Training, finish, path
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._job._member import abort_all


@job
def asked_after_loading() -> dict[str, Any]:
    """Goes back to a state in mid-training, and asks for it before the next step; returns digests
    of the weights without that, with it, and from the state that was asked for.
    """
    training = Training(os.environ["CODEC"])
    training.train(SAVED_AFTER)
    model, optimizer = copy.deepcopy(
        (training.model.module.state_dict(), training.optimizer.state_dict())
    )
    state = training.state.state_dict()

    def go_on(state: dict[str, Any] | None) -> str:
        if state is not None:
            training.model.module.load_state_dict(model)
            training.optimizer.load_state_dict(copy.deepcopy(optimizer))
            training.state.load_state_dict(state)
            training.steps = SAVED_AFTER
            asked.append(training.state.state_dict())
        training.train(3)
        return digest(training.model)

    asked: list[dict[str, Any]] = []
    digests = [go_on(None), go_on(state), go_on(asked[0])]
    training.state.close()
    return {"digests": digests, "equal": asked[0] == state}


@job
def by_way_of_one_node() -> dict[str, Any]:
    """Goes on for two steps on one node, which compresses nothing, and then on both again."""
    first = Training()
    straight = first.train(SAVED_AFTER)
    first.save(path(), state=False)
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        second = Training(group=alone)
        second.load(path())
        second.train(2)
        model, optimizer = second.model.module, second.optimizer
        saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        torch.save(saved, path())
        second.state.close()
    dist.barrier()
    third = Training()
    third.load(path())
    return finish({"straight": straight, "resumed": third.train(3)}, first, third)


@job
def one_ends_early() -> str:
    """Lets rank 1 fail the job before the first step, which rank 0 begins; returns its error."""
    training = Training()
    dist.barrier()
    if dist.get_rank() == 1:
        abort_all()
        return "gone"
    return outcome(lambda: training.train(1))


def resumed() -> tuple[Training, Training]:
    """Returns a training, and another one that has loaded its checkpoint and is to go on."""
    first = Training()
    first.train(SAVED_AFTER)
    first.save(path(), state=False)
    second = Training()
    second.load(path())
    return first, second


@job
def one_has_no_batch() -> dict[str, Any]:
    """Resumes inside join(), where rank 1 is out of data from the beginning."""
    first, second = resumed()
    with second.model.join():
        second.train(3 if dist.get_rank() == 0 else 0)
    since = second.state.stats()["compressed_since"]
    return finish({"since": since, "digest": digest(second.model)}, first, second)


@job
def one_is_in_eval_mode() -> dict[str, Any]:
    """Resumes with rank 0 in eval mode, which has evaluated, with gradients, before rank 1 came."""
    first, second = resumed()
    if dist.get_rank() == 0:
        second.model.eval()(torch.ones(1, 3, 8, 8))
    dist.barrier()
    return finish({"sent": second.train(3), "digest": digest(second.model)}, first, second)


@job
def in_eval_mode() -> dict[str, Any]:
    """Resumes in eval mode on all ranks, after gradients that are not averaged on rank 1 alone."""
    first, second = resumed()
    second.model.eval()
    if dist.get_rank() == 1:
        with second.model.no_sync():
            second.model(torch.ones(1, 3, 8, 8)).sum().backward()
    dist.barrier()
    return finish({"sent": second.train(3)}, first, second)


class WithHead(torch.nn.Module):
    """Is an actor, or a critic, on an encoder that both have."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.encoder(x)))
        return result


@job
def actor_and_critic() -> dict[str, Any]:
    """Resumes two modules that share an encoder, in one optimizer, from its checkpoint and files;
    returns the actor's next gradient without a break, and after it.
    """
    folder = path().with_name(f"{path().name}-residuals")

    def backward(model: DistributedDataParallel, step: int, factor: float) -> torch.Tensor:
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        (factor * model(torch.randn(4, 64, generator=generator)).square().mean()).backward()
        gradient = model.module.head.weight.grad
        assert gradient is not None
        return gradient.clone()

    def build() -> tuple[list[DistributedDataParallel], torch.optim.SGD]:
        torch.manual_seed(7)
        encoder = torch.nn.Linear(64, 64)
        models = [DistributedDataParallel(WithHead(encoder)) for _ in range(2)]
        for model in models:
            thalweg.ddp.attach(model, "topk:ratio=0.05,start=1;elems<1024=fp32", residuals=folder)
        parameters = {p: None for model in models for p in model.parameters()}
        return models, torch.optim.SGD(parameters, lr=0)

    def close(models: list[DistributedDataParallel]) -> None:
        for model in models:
            state = thalweg.ddp.state_of(model)
            assert state is not None
            state.close()
        dist.barrier()

    (actor, critic), optimizer = build()
    for step in range(6):
        backward(actor, step, 1)
        backward(critic, step, 1000)
    saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved)
    straight = backward(actor, 6, 1)
    close([actor, critic])
    (actor, critic), optimizer = build()
    optimizer.load_state_dict(saved[0])
    equal = torch.equal(straight, backward(actor, 6, 1))
    close([actor, critic])
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"equal": equal}


@job
def another_codec() -> dict[str, Any]:
    """Wraps a module anew, for fp16; returns what checkpoints have, before and after the first job
    is closed.
    """
    first = Training()
    first.train(1)
    second = DistributedDataParallel(first.model.module)
    state = thalweg.ddp.attach(second, "fp16")
    second(torch.ones(1, 3, 8, 8)).sum().backward()
    before = sorted(first.optimizer.state_dict())
    first.state.close()
    after = sorted(first.optimizer.state_dict())
    state.close()
    return {"before": before, "after": after}


@job
def saved_whole() -> dict[str, Any]:
    """Saves a module that keeps files, before its first step and after it; returns whether it needs
    Thalweg to be loaded.
    """
    folder = path().with_name(f"{path().name}-residuals")
    training = Training(residuals=folder)
    needs = []
    for steps in (0, 1):
        training.train(steps)
        saved = io.BytesIO()
        torch.save(training.model, saved)
        needs.append(b"thalweg" in saved.getvalue())
    training.state.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"needs": needs}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
