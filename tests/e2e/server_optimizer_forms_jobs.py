"""Contains scripts that do not write their steps as most do: `server_optimizer_forms_jobs.py FORM
OUT`. Each returns by how much its weights differ from those that torch's optimizer has, and by how
much these have moved.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import job_runner
import torch
import torch.distributed as dist
from server_optimizer_pairs import SETTINGS, STEPS, Pair, loss_of, make_attention, make_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def by_hand() -> tuple[float, float]:
    """Computes gradients without backward()."""
    pair = Pair()
    for step in range(STEPS):
        pair.optimizer.zero_grad()
        parameters = list(pair.ours.parameters())
        grads = torch.autograd.grad(loss_of(pair.ours, step, dist.get_rank()), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        pair.optimizer.step()
        pair.step_of_torch([step])
    return pair.differences()


def uneven_accumulation() -> tuple[float, float]:
    """Adds up two batches a step, and has one left at the end."""
    pair = Pair()
    batches: list[int] = []
    for step in range(STEPS):
        batches.append(step)
        is_full = len(batches) == 2
        with nullcontext() if is_full else pair.optimizer.accumulate():
            loss_of(pair.ours, step, dist.get_rank()).backward()
        if is_full or step == STEPS - 1:
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            pair.step_of_torch(batches)
            batches.clear()
    return pair.differences()


def channels_last() -> tuple[float, float]:
    """Trains a model whose weights are not contiguous."""
    pair = Pair()
    pair.optimizer.close()
    pair.ours.to(memory_format=torch.channels_last)
    assert not pair.ours[0].weight.is_contiguous()
    pair.optimizer = pair.serve()
    for step in range(STEPS):
        pair.step_both(step)
    return pair.differences()


def looked_at() -> tuple[float, float]:
    """Takes a checkpoint in torch's way between two steps, which makes a step for that."""
    pair = Pair()
    for step in range(STEPS):
        pair.step_both(step)
        pair.optimizer.zero_grad()
        get_optimizer_state_dict(pair.ours, pair.optimizer)
    return pair.differences()


def clipped_twice() -> tuple[float, float]:
    """Clips to a bound, and measures the norm afterwards, and before."""
    pair = Pair(max_grad_norm=1e-2)
    norms: list[float] = []
    for step in range(STEPS):
        pair.optimizer.zero_grad()
        loss_of(pair.ours, step, dist.get_rank()).backward()
        bounds = (float("inf"), 5e-3, float("inf"))
        ours = [float(pair.optimizer.clip_grad_norm_(bound)) for bound in bounds]
        pair.optimizer.step()
        theirs = pair.step_of_torch([step], (*bounds, 1e-2))
        norms += [abs(a / b - 1) for a, b in zip(ours, theirs[:3], strict=True)]
    # torch divides by the norm and 1e-6.
    assert max(norms) < 1e-6 / 5e-3 + 1e-5, norms
    return pair.differences()


def published_by_one() -> tuple[float, float]:
    """Lets rank 0 alone change the weights, and publish them."""
    pair = Pair()
    for step in range(STEPS):
        if step == 3:
            for model in (pair.ours, pair.torchs):
                if model is pair.torchs or dist.get_rank() == 0:
                    with torch.no_grad():
                        model[0].weight.mul_(2)
            pair.optimizer.publish()
        pair.step_both(step)
    return pair.differences()


def published_data() -> tuple[float, float]:
    """Changes weights in a way that torch does not count, and publishes them."""
    pair = Pair()
    for step in range(STEPS):
        if step == 3:
            for parameter in (*pair.ours.parameters(), *pair.torchs.parameters()):
                parameter.data.clamp_(-0.05, 0.05)
            pair.optimizer.publish()
        pair.step_both(step)
    return pair.differences()


def restored_from_a_vector() -> tuple[float, float]:
    """Goes back to weights that become the parameters' data, and to the optimizer's state."""
    pair = Pair()
    both = [(pair.ours, pair.optimizer), (pair.torchs, pair.torch_optimizer)]
    for step in range(STEPS):
        if step == 2:
            vectors = [nn.utils.parameters_to_vector(model.parameters()) for model, _ in both]
            states = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in both]
        if step == 5:
            for (model, optimizer), vector, state in zip(both, vectors, states, strict=True):
                nn.utils.vector_to_parameters(vector, model.parameters())
                optimizer.load_state_dict(state)
        pair.step_both(step)
    return pair.differences()


def differentiated_again() -> tuple[float, float]:
    """Lets backward() leave gradients that can be differentiated."""
    pair = Pair()
    for step in range(STEPS):
        pair.step_both(step, create_graph=True)
    return pair.differences()


def scaled_at_first() -> tuple[float, float]:
    """Scales losses in the first steps alone, beside a model that torch trains with a scaler."""
    pair, beside = Pair(loss_scaling=True), make_model()
    trains_beside = torch.optim.SGD(beside.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 4.0)]
    for step in range(STEPS):
        pair.optimizer.zero_grad()
        loss = loss_of(pair.ours, step, dist.get_rank())
        if step < 3:
            scalers[-1].scale(loss).backward()
            scalers[-1].step(pair.optimizer)
            scalers[-1].update()
        else:
            del scalers[1:]
            loss.backward()
            pair.optimizer.step()
        scalers[0].scale(loss_of(beside, step, 0)).backward()
        scalers[0].step(trains_beside)
        scalers[0].update()
        pair.step_of_torch([step])
    return pair.differences()


def idle_without_a_rate() -> tuple[float, float]:
    """Lets rank 1 compute nothing in a step whose learning rate is 0, with zeros as gradients."""
    pair = Pair(find_unused_parameters=True)
    for step in range(STEPS):
        for optimizer in (pair.optimizer, pair.torch_optimizer):
            optimizer.param_groups[0]["lr"] = 0.0 if step == 3 else SETTINGS["lr"]
        pair.optimizer.zero_grad(set_to_none=False)
        if step != 3:
            loss_of(pair.ours, step, dist.get_rank()).backward()
            pair.step_of_torch([step])
        else:
            if dist.get_rank() == 0:
                loss_of(pair.ours, step, 0).backward()
            pair.torch_optimizer.zero_grad()
            (loss_of(pair.torchs, step, 0) / 2).backward()
            pair.torch_optimizer.step()
        pair.optimizer.step()
    return pair.differences()


def overlapped_attention() -> tuple[float, float]:
    """Trains modules that read the weights of others in them, and evaluates some steps at once."""
    pair = Pair(make_attention, overlap=True, bucket_cap_mb=1e-4)
    for step in range(STEPS):
        pair.step_both(step)
        if step % 2:  # otherwise a forward pass in training is the next that reads weights
            found = _evaluated(pair.ours)
            waited = make_attention()
            waited.load_state_dict(pair.ours.state_dict())
            assert found == _evaluated(waited)
    pair.ours.state_dict()
    return pair.differences()


def overlapped_return() -> tuple[float, float]:
    """Goes back to a checkpoint right after a step that does not wait for its weights."""
    pair = Pair(overlap=True)
    both = [(pair.ours, pair.optimizer), (pair.torchs, pair.torch_optimizer)]
    for step in range(STEPS):
        pair.step_both(step)
        if step == 1:
            saved = [copy.deepcopy([one.state_dict() for one in each]) for each in both]
        if step == 4:
            for (model, optimizer), (weights, state) in zip(both, saved, strict=True):
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
    pair.ours.state_dict()
    return pair.differences()


@torch.no_grad()
def _evaluated(model: nn.Module) -> float:
    loss = float(loss_of(model.eval(), 0, 0))
    model.train()
    return loss


FORMS: dict[str, Callable[[], tuple[float, float]]] = {
    form.__name__: form
    for form in (
        by_hand,
        uneven_accumulation,
        channels_last,
        looked_at,
        clipped_twice,
        published_by_one,
        published_data,
        restored_from_a_vector,
        differentiated_again,
        scaled_at_first,
        idle_without_a_rate,
        overlapped_attention,
        overlapped_return,
    )
}


if __name__ == "__main__":
    job_runner.run(lambda name: FORMS[name]())
