"""Trains with Lightning's default Trainer; see common.py."""

from typing import Any

import pytorch_lightning as lightning
import torch
from common import SAVED_AT, Task, data, layers, main, seen


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Look(lightning.Callback):
    """Looks at the wrapped module before Lightning unwraps it."""

    seen: dict[str, Any]

    def on_train_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self.seen = seen(trainer.model)


def train(task: Task, strategy: str | lightning.strategies.Strategy = "ddp") -> dict[str, Any]:
    look = Look()
    save = lightning.callbacks.ModelCheckpoint(task.folder, "last", every_n_train_steps=task.steps)
    trainer = lightning.Trainer(
        max_steps=task.steps,
        num_nodes=2,
        devices=1,
        accelerator="cpu",
        strategy=strategy,
        callbacks=[look, save] if task.saves else [look],
        enable_checkpointing=task.saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = str(task.folder / "last.ckpt") if task.resumes else None
    # The checkpoint ends an epoch: within one, Lightning would begin with its first batch again.
    epoch = torch.utils.data.DataLoader(data(SAVED_AT), batch_size=2)
    trainer.fit(Model(), epoch, ckpt_path=path)
    return look.seen


if __name__ == "__main__":
    main(train)
