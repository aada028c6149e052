"""A training script that does not mention Thalweg: `local_script.py MODE OUT`.

MODE is several of adagrad, accumulate, byhand, compiled, clip, scaler, part, two, hook, join, rest,
anew, anewhalf, anewscaled, phases and resumed, joined by "_".
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accumulating import accumulating
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

STEPS = 12


def make_model() -> nn.Module:
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))


def make_optimizers(mode: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if "part" in mode:
        return [torch.optim.SGD(parameters[2:], lr=0.1)]
    if "two" in mode:
        return [torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:])]
    if "adagrad" in mode:
        return [torch.optim.Adagrad(parameters, lr=0.1)]
    return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]


def loss_of(mode: str, ddp: nn.Module, step: int, part: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    batch = torch.randn(8, 20, generator=seed)
    if "compiled" in mode:
        return torch.compile(lambda x: ddp(x).square().mean(), backend="eager")(batch)
    return ddp(batch).square().mean()


def resume(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads what another training has saved, whose weights are others."""
    model, state = get_state_dict(ddp, optimizer)
    changed = {name: 0.5 * tensor for name, tensor in model.items()}
    set_state_dict(ddp, optimizer, model_state_dict=changed, optim_state_dict=state)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for tensor in model.parameters():
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    mode, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model()
    ddp = DistributedDataParallel(model)
    if "hook" in mode:
        ddp.register_comm_hook(None, allreduce_hook)
    optimizers = make_optimizers(mode, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, gamma=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled="scaler" in mode)
    if "resumed" in mode:
        resume(ddp, optimizers[0])
    digests = []
    kept = []
    for step in range(STEPS - ("rest" in mode)):
        if "anew" in mode and step == 6:
            optimizers = make_optimizers("part" if "anewhalf" in mode else mode, model)
            scaler = torch.amp.GradScaler("cpu", enabled="anewscaled" in mode)
        if "phases" in mode and step == 6:
            kept.append(ddp)
            model[0].requires_grad_(False)
            ddp = DistributedDataParallel(model)
            optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        passes = 2 if "accumulate" in mode else 1
        for part in range(passes):
            with accumulating(ddp, by_hand="byhand" in mode, is_last=part + 1 == passes):
                scaler.scale(loss_of(mode, ddp, step, part)).backward()
        if "clip" in mode:
            clip_grad_norm_(ddp.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        digests.append(digest(model))
    if "join" in mode:
        with ddp.join():
            pass
    lr = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    Path(out).write_text(json.dumps({"digests": digests, "lr": lr}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
