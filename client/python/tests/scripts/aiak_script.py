"""A script as in AIAK-Training's manual; it does not mention Thalweg."""

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast  # no effect without a GPU

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
).to(device)
optimizer = torch.optim.LAMB(model.parameters(), lr=0.02, weight_decay=0.01)
model, optimizer = torch.cuda.amp.aiak_amp_decorate(model, optimizer)
scaler = GradScaler()

inputs = torch.randn(64, 1, 8, 8, device=device)
labels = inputs.view(64, 4, 16).sum(dim=2).argmax(dim=1)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    with autocast():
        loss = nn.functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(torch.cuda.amp.aiak_amp_parameters(optimizer), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())

assert next(model.parameters()).dtype is torch.float16
assert losses[-1] < losses[0] / 2, losses
print(f"trained: {losses[0]:.3f} to {losses[-1]:.3f}")
