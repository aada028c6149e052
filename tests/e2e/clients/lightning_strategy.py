"""Trains with Lightning's Trainer and our strategy, without variables; see common.py."""

import logging
import os
from typing import Any

from common import Task, main
from lightning_training import train as train_with

from thalweg.lightning import ThalwegStrategy


def train(task: Task) -> dict[str, Any]:
    codec = os.environ.pop("THALWEG_CODEC")  # so that nothing but the strategy attaches
    return train_with(task, ThalwegStrategy(codec) if codec else "ddp")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # explicit calls log where the script wants it
    main(train)
