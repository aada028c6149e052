"""A training script that does not mention Thalweg: `served_script.py MODE OUT`.

MODE is several of sgd, lamb, amsgrad, accumulate, byhand, clip, cliponly, scaler, unused, part,
hook, join, evaluate, average, handzero, keepzero, static, second, reset and unequal, joined by "_".
"""

import contextlib
import gc
import hashlib
import io
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accumulating import accumulating
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

STEPS = 12


class Model(nn.Sequential):
    skips = False  # a layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            if number != 3 or not self.skips:
                x = layer(x)
        return x


def make_model() -> Model:
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    # Before a BatchNorm a bias would have gradients of rounding alone.
    model = Model(
        nn.Linear(20, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Linear(64, 5),
    )
    model[4].bias.requires_grad_(False)
    return model


def make_optimizer(mode: str, model: nn.Module) -> torch.optim.Optimizer:
    trainable = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": trainable[:2]}, {"params": trainable[2:], "lr": 0.02}]
    if "part" in mode:
        return torch.optim.AdamW(trainable[2:], lr=0.01)
    if "sgd" in mode:
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
    if "amsgrad" in mode:
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    if "lamb" in mode:
        return torch.optim.LAMB(groups, lr=0.01, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=0.01)


def resume(mode: str, optimizer: torch.optim.Optimizer) -> None:
    """Loads a checkpoint of a training in which later parameters have joined in step after step."""
    if "unequal" not in mode:
        return
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    states = {
        number: {
            "step": torch.tensor(float(len(trained) - number)),
            "exp_avg": torch.zeros_like(one),
            "exp_avg_sq": torch.ones_like(one),
        }
        for number, one in enumerate(trained)
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def halve(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Is a communication hook that averages, and halves the gradients."""
    work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def forget_gradients(mode: str, optimizer: torch.optim.Optimizer, ddp: nn.Module) -> None:
    if "handzero" in mode:
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    else:
        optimizer.zero_grad(set_to_none="keepzero" not in mode)


@torch.no_grad()
def meddle(mode: str, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Changes by hand what the optimizer has, between two steps."""
    if "average" in mode:  # of weights, as of the last steps
        model[3].weight.mul_(0.5)
    if "reset" in mode:
        optimizer.state.clear()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


@torch.no_grad()
def evaluate(ddp: nn.Module) -> None:
    """Evaluates with a batch more on each worker than on the one before, and stores the module."""
    ddp.eval()
    for _ in range(1 + dist.get_rank()):
        ddp(torch.ones(8, 20))
    ddp.train()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DistributedDataParallel
    assert loaded.require_backward_grad_sync is True  # nobody else averages its gradients


def main() -> None:
    mode, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model()
    ddp = DistributedDataParallel(
        model, find_unused_parameters="unused" in mode, static_graph="static" in mode
    )
    if "hook" in mode:
        ddp.register_comm_hook(None, halve)
    optimizer = make_optimizer(mode, model)
    resume(mode, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**8, growth_interval=4, enabled="scaler" in mode
    )
    norms = []
    together = contextlib.ExitStack()
    if "join" in mode:
        together.enter_context(ddp.join())
    for step in range(STEPS):
        # Both workers, or one of them.
        model.skips = "unused" in mode and step % 3 == 2 and (step < 6 or dist.get_rank() == 0)
        model.skips |= "static" in mode
        forget_gradients(mode, optimizer, ddp)
        passes = 2 if "accumulate" in mode else 1
        for part in range(passes):
            seed = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            with accumulating(ddp, by_hand="byhand" in mode, is_last=part + 1 == passes):
                loss = ddp(torch.randn(8, 20, generator=seed)).square().mean()
                if "scaler" in mode and step % 5 == 3 and dist.get_rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        if "clip" in mode:
            scaler.unscale_(optimizer)
            clipped = list(ddp.parameters())[: 2 if "cliponly" in mode else None]
            norms.append(float(clip_grad_norm_(clipped, 0.5)))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step == 3:
            meddle(mode, model, optimizer)
        if "second" in mode and step == 3:
            optimizer = make_optimizer(mode, model)
        if "evaluate" in mode and step % 4 == 1:
            evaluate(ddp)
        if step == STEPS // 2:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    together.close()
    state = optimizer.state_dict()
    values = [one.flatten().float() for one in model.state_dict().values()]
    result = {
        "digest": digest(dict(model.named_parameters())),
        "weights": torch.cat(values).tolist(),
        "kind": type(optimizer).__name__,
        "is": isinstance(optimizer, torch.optim.Optimizer),
        "state": sorted(state["state"].get(0, {})),
        "norms": norms,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "scale": scaler.get_scale(),
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    del ddp
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def digest(state: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in state.items():
        sha.update(name.encode() + tensor.detach().numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
