"""Trains a small BERT with Hugging Face's Trainer; see common.py."""

from typing import Any

import torch
from common import Task, main, seen
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

WORDS = 30


class Sentences(torch.utils.data.Dataset):
    """Random words, of which the first is the label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.words = torch.randint(WORDS, (256, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index, 0] % 2}


def train(task: Task) -> dict[str, Any]:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        output_dir=str(task.folder),
        max_steps=task.steps,
        per_device_train_batch_size=2,
        save_strategy="steps" if task.saves else "no",
        save_steps=task.steps,
        lr_scheduler_type="constant",  # whatever the number of steps
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        seed=3,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=task.resumes or None)
    return seen(trainer.model_wrapped)


if __name__ == "__main__":
    main(train)
