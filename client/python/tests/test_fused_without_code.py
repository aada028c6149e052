"""Tests torch's own optimizers in a script that only the environment tells of Thalweg."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
torch.manual_seed(0)

class Mine(torch.optim.AdamW):
    def _init_group(self, *args):
        return super()._init_group(*args)

def train(kind, dtype=torch.float32, steps=20, **options):
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (7, 5000)]
    optimizer = kind(params, lr=1e-2, **options)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(steps):
        def closure():
            optimizer.zero_grad()
            loss = sum(((p - 1) ** 2).sum() for p in params)
            loss.backward()
            return loss
        loss = optimizer.step(closure)
        schedule.step()
    assert len(calls) == steps
    types = sorted({str(v.dtype) for s in optimizer.state.values() for v in s.values()})
    return torch.cat([p.detach() for p in params]).tolist(), types, loss.item()

native = "thalweg._C" in sys.modules
results = {
    "AdamW": train(torch.optim.AdamW, weight_decay=0.1),
    "Adam": train(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "SGD": train(torch.optim.SGD, momentum=0.9, nesterov=True),
    "half": train(torch.optim.AdamW, torch.bfloat16),
    "double": train(torch.optim.SGD, torch.float64),
    "mine": train(Mine),
}
counts = None
if "thalweg._activation._fused_optimizers" in sys.modules:
    from thalweg.optim import fallbacks, fused_steps
    counts = [fused_steps, fallbacks]
print(json.dumps({"native": native, "results": results, "counts": counts}))
"""


SCALED = """
import json, sys, torch
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
scaler.scale((2 * param).sum()).backward()
scaler.step(optimizer)
counts = sys.modules.get("thalweg.optim._counts")
print(json.dumps([param.grad.tolist(), counts and counts.fused_steps]))
"""


def run(script: str = SCRIPT, **variables: str):
    names = ("THALWEG_", "AIAK_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def plain():
    return json.loads(run().stdout)


@pytest.mark.parametrize("variable", ["AIAK_FUSED_OPTIMIZER", "THALWEG_FUSED_OPTIMIZER"])
def test_the_variable_has_torchs_optimizers_run_fused(plain, variable):
    result = run(**{variable: "1"})
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert not said["native"]  # before the first step
    assert plain["counts"] is None
    fused, fallbacks = said["counts"]
    assert fused == {"AdamW": 20, "Adam": 20, "SGD": 20}
    assert sum(fallbacks.values()) == 60
    assert sum("torch.bfloat16, expected torch.float32" in reason for reason in fallbacks) == 1
    assert sum("torch.float64, expected torch.float32" in reason for reason in fallbacks) == 1
    assert "Mine is a subclass with state of its own" in fallbacks
    for name in ("half", "double", "mine"):
        assert said["results"][name] == plain["results"][name]
    for name in fused:
        ours, theirs = said["results"][name], plain["results"][name]
        assert ours[1:2] == theirs[1:2]
        for a, b in zip(ours[0], theirs[0], strict=True):
            # There are 20 steps of at most 0.1 with some tens of roundings each, of parameters up
            # to 4.
            assert abs(a - b) <= 20 * 2.0**-24 * (2 * 4 + 40 * 0.1)
    lines = result.stderr.splitlines()
    assert sum(f"torch.optim.AdamW runs fused: {variable}=1" in line for line in lines) == 1
    assert sum("keeps torch's step" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("variables", "steps"), [({}, None), ({"THALWEG_FUSED_OPTIMIZER": "1"}, 1)]
)
def test_gradients_are_unscaled_after_a_step_as_with_torch(variables, steps):
    result = run(SCALED, **variables)
    assert result.returncode == 0, result.stderr
    counted = None if steps is None else {"AdamW": steps}
    assert json.loads(result.stdout) == [[2.0, 2.0, 2.0], counted]


def test_malformed_variable_is_refused_by_name_in_the_first_step():
    result = run(AIAK_FUSED_OPTIMIZER="yes")
    assert result.returncode != 0
    assert "AIAK_FUSED_OPTIMIZER is 'yes', expected 0 or 1" in result.stderr


COPIED = """
import copy, json, pickle, torch
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
param.sum().backward()
optimizer.step()
copies = [optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
print(json.dumps([sorted(each.state_dict()["state"][0]) for each in copies]))
"""


@pytest.mark.parametrize("variables", [{}, {"THALWEG_FUSED_OPTIMIZER": "1"}])
def test_copies_of_an_sgd_have_torchs_keys_in_their_checkpoints(variables):
    done = run(COPIED, **variables)
    assert json.loads(done.stdout) == [["momentum_buffer"]] * 3, done.stderr


COUNTED = """
import copy, torch
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
param = torch.nn.Parameter(torch.ones(3))
optimizer = Counting([param], lr=0.1)
for _ in range(2):
    param.sum().backward()
    optimizer.step()
print(copy.deepcopy(optimizer).state_dict()["state"][0].get("step"))
"""


def test_steps_that_a_subclass_of_sgd_counts_stay_in_checkpoints_of_its_copies():
    done = run(COUNTED, THALWEG_FUSED_OPTIMIZER="1")
    assert done.stdout.strip() == "2", done.stderr
