"""Tests the strategy for Lightning without a training; tests/e2e/test_clients.py has one."""

import pytest
import pytorch_lightning

from thalweg.lightning import ThalwegStrategy


@pytest.mark.parametrize("name", ["ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"])
def test_argument_that_averages_differently_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"ThalwegStrategy got {name}, but averages gradients"):
        ThalwegStrategy("fp16", **{name: print})


def test_arguments_of_lightnings_strategy_are_passed_on():
    strategy = ThalwegStrategy("fp16", process_group_backend="gloo", ddp_comm_hook=None)
    assert strategy.process_group_backend == "gloo"


def test_trainer_finds_the_strategy_by_its_name():
    trainer = pytorch_lightning.Trainer(
        strategy="thalweg", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    assert type(trainer.strategy) is ThalwegStrategy


def test_state_before_fit_is_an_error_that_says_so():
    with pytest.raises(RuntimeError, match="fit\\(\\) has not wrapped a module yet"):
        _ = ThalwegStrategy().state
