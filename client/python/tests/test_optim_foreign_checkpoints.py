"""Tests checkpoints of torch's and apex's Adam, loaded by LAMB and by `apex.optimizers`."""

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg.compat._apex_optimizers import FusedAdam as ApexAdam
from thalweg.compat._apex_optimizers import FusedLAMB as ApexLAMB
from thalweg.optim import LAMB

pytestmark = pytest.mark.numeric

OPTIONS = {"lr": 1e-2, "weight_decay": 0.5}


def run(optimizer, params, steps):
    for step in steps:
        set_grads(step, params)
        optimizer.step()


def saved_by(kind, without=()):
    """Returns parameters after 10 steps, and a checkpoint whose groups lack some keys."""
    params = make_params()
    optimizer = kind(params, **OPTIONS)
    run(optimizer, params, range(10))
    state = optimizer.state_dict()
    for key in without:
        del state["param_groups"][0][key]
    return params, state


def apexs(state):
    """Returns it as apex saves it: the count of steps is the group's, and there are fewer keys."""
    (group,) = state["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    moments = ("exp_avg", "exp_avg_sq")
    return {
        "state": {i: {key: s[key] for key in moments} for i, s in state["state"].items()},
        "param_groups": [{**kept, "bias_correction": True, "step": 10}],
    }


def gone_on(optimizer, params, state):
    optimizer.load_state_dict(state)
    run(optimizer, params, range(10, 20))
    return params


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("old", [False, True])
def test_weight_decay_stays_the_optimizers_own(kind, decoupled, old):
    params, state = saved_by(kind, without=["decoupled_weight_decay"] if old else [])
    taken, reference = copy_of(params), copy_of(params)
    gone_on(ApexAdam(taken, adam_w_mode=decoupled, **OPTIONS), taken, state)
    state["param_groups"][0].pop("decoupled_weight_decay", None)
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    gone_on(theirs(reference), reference, state)
    assert distance(taken, reference) <= bound(10, 1e-2)


def test_checkpoint_of_apexs_adam_goes_on_with_its_count():
    params, state = saved_by(torch.optim.AdamW)
    taken, reference = copy_of(params), copy_of(params)
    optimizer = ApexAdam(taken, lr=1.0)
    gone_on(optimizer, taken, apexs(state))
    gone_on(torch.optim.AdamW(reference), reference, state)
    assert distance(taken, reference) <= bound(10, 1e-2)
    saved = optimizer.state_dict()
    assert {int(s["step"]) for s in saved["state"].values()} == {20}
    assert "step" not in saved["param_groups"][0]


@pytest.mark.parametrize("kind", [LAMB, ApexLAMB])
@pytest.mark.parametrize("form", [apexs, dict])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_keeps_the_settings_that_a_checkpoint_lacks(kind, form, dtype):
    params, state = saved_by(torch.optim.Adam)
    taken, reference = copy_of(params, dtype), copy_of(params, dtype)
    settings = {"max_grad_norm": 0.25, "use_nvlamb": True}
    optimizer = kind([{"params": taken, **settings}], **OPTIONS)
    gone_on(optimizer, taken, form(state))
    assert optimizer.param_groups[0]["max_grad_norm"] == 0.25
    straight = kind(reference, **OPTIONS, **settings)
    group = {**straight.param_groups[0], "eps": 1e-8, "params": [*range(len(params))]}
    gone_on(straight, reference, {"state": state["state"], "param_groups": [group]})
    assert all(map(torch.equal, taken, reference))


def test_mode_that_a_checkpoint_has_is_taken_from_it():
    params = make_params()
    saved = ApexAdam(params, adam_w_mode=False).state_dict()
    optimizer = ApexAdam(copy_of(params))
    optimizer.load_state_dict(saved)
    assert not optimizer.param_groups[0]["adam_w_mode"]
