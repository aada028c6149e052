"""Tests what `thalweg profile` measures of a script, in this process."""

import argparse
import json

import pytest
import torch
from PIL import Image

from thalweg._settings._config import ConfigError
from thalweg.cli import _profile_clock, _profile_worker, _run, main
from thalweg.cli._profile_update import fused_seconds

SCRIPT = """
import sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(int(sys.argv[1]), 4))
for (inputs,) in torch.utils.data.DataLoader(data):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
print("reached its end")
"""


def arguments(folder, steps, skip, data, rate=None):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return argparse.Namespace(
        command=[str(script), str(data)],
        module=False,
        steps=steps,
        skip=skip,
        out=folder / "out",
        rate=rate,
    )


@pytest.fixture(autouse=True)
def arguments_are_put_back(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setattr("sys.path", list(__import__("sys").path))


def test_so_many_steps_are_measured_after_the_skipped_ones(tmp_path, capsys):
    assert _profile_worker.run(arguments(tmp_path, steps=5, skip=2, data=100)) == 0
    said = capsys.readouterr().out
    assert "reached its end" not in said
    assert "mean of 5 steps; 1 worker on 1 node; nothing to average" in said
    found = json.loads((tmp_path / "out/profile.json").read_text())
    assert list(found["workers"][0]) == list(_profile_clock.PHASES)
    assert found["measured"]["optimizers"] == ["torch.optim.sgd.SGD"]
    assert 0 < found["measured"]["fused_update"] < 1
    with Image.open(tmp_path / "out/profile.png") as picture:
        assert picture.width > 400
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_rate_without_a_link_is_said_to_have_no_effect(tmp_path, capsys):
    _profile_worker.run(arguments(tmp_path, steps=3, skip=1, data=100, rate=1e8))
    assert "- --rate has no effect: one node takes part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "nodes"), [([], 1), (["--rate", "1mbit"], 2), (["--rate", "1mbit", "--nodes=3"], 3)]
)
def test_rate_alone_means_two_nodes(options, nodes, tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(_run, "run", lambda plan: plans.append(plan) or 0)
    assert main(["profile", *options, "--out", str(tmp_path / "out"), __file__]) == 0
    assert [(plan.nodes, plan.nproc, plan.shards) for plan in plans] == [(nodes, 1, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "1", "--rate", "1mbit"], "--nodes 1 leaves none"),
        (["--here", "--nodes", "1"], "not for --here"),
        (["--here", "--nproc", "2"], "not for --here"),
        (["--here", "--shards", "0"], "not for --here"),
        (["--here", "--codec", "fp16"], "set THALWEG_CODEC"),
    ],
)
def test_options_without_effect_are_refused(options, message, tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise AssertionError", encoding="ascii")
    assert main(["profile", *options, str(tmp_path / "train.py")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_step_is_tried_out_for_torchs_optimizers_of_float32(kind):
    def of(dtype, size=1000):
        return kind([torch.nn.Parameter(torch.zeros(size, dtype=dtype))], lr=0.1)

    assert 0 < fused_seconds(of(torch.float32)) < 1
    assert fused_seconds(of(torch.float16)) is None
    assert fused_seconds(of(torch.float32, size=0)) is None
    assert fused_seconds(torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(3))])) is None


def test_script_that_ends_early_is_reported_with_the_steps_it_made(tmp_path, capsys):
    assert _profile_worker.run(arguments(tmp_path, steps=50, skip=1, data=6)) == 0
    assert "reached its end" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/profile.json").read_text())["steps"] == 5


def test_script_with_too_few_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"made 1 optimizer steps after the first 3, expected 3"):
        _profile_worker.run(arguments(tmp_path, steps=50, skip=3, data=4))


def test_report_is_where_profile_was_started_though_the_script_goes_elsewhere(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(f"import os, tempfile; os.chdir(tempfile.gettempdir())\n{SCRIPT}")
    command = ["profile", "--here", "--steps", "3", "--skip", "1", "--out", "mine"]
    assert main([*command, str(script), "100"]) == 0
    assert (tmp_path / "mine" / "profile.json").exists()


def test_missing_scripts_and_malformed_options_are_refused(capsys):
    assert main(["profile", "no/such/script.py"]) == 2
    assert "there is no script" in capsys.readouterr().err
    for option in (["--rate", "fast"], ["--steps", "0"], ["--skip", "-1"]):
        with pytest.raises(SystemExit):
            main(["profile", *option, __file__])
    assert "expected a rate such as 940mbit or 10gbit, got 'fast'" in capsys.readouterr().err


@pytest.mark.parametrize("here", [[], ["--here"]])
def test_folder_that_cannot_be_made_is_said_before_the_script_runs(here, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "train.py").write_text("raise AssertionError", encoding="ascii")
    out = tmp_path / "file" / "out"
    assert main(["profile", *here, "--out", str(out), str(tmp_path / "train.py")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"thalweg: --out {out} cannot be made: {file} is not a folder\n"


@pytest.mark.parametrize("here", [[], ["--here"]])
def test_profile_that_fails_leaves_no_folder(here, tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "run", lambda _: 1)
    command = ["profile", *here, "--out", str(tmp_path / "out" / "mine")]
    (tmp_path / "train.py").touch()
    assert main([*command, str(tmp_path / "train.py")]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("name", ["profile.md", "profile.json", "profile.png"])
def test_table_is_shown_though_a_file_cannot_be_written(name, tmp_path, capsys):
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{name} cannot be written: Is a directory"):
        _profile_worker.run(arguments(tmp_path, steps=3, skip=1, data=100))
    assert "mean of 3 steps; 1 worker on 1 node" in capsys.readouterr().out


@pytest.fixture
def ticking(monkeypatch):
    """Makes the clock stand still but for tick(seconds)."""
    now = [0.0]
    monkeypatch.setattr(_profile_clock, "_time", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


class Slow(torch.nn.Module):
    """Takes 2 s forward, 3 s backward."""

    def __init__(self, tick):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.tick = tick

    def forward(self, inputs):
        self.tick(2)
        result = self.inner(inputs)
        result.register_hook(lambda _: self.tick(3))
        return result


def test_phases_are_told_apart_and_their_sum_is_the_step(ticking):
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, _):
            ticking(1)
            return torch.ones(1)

    class Sgd(torch.optim.SGD):
        def step(self, closure=None):
            ticking(4)
            return super().step(closure)

    model = Slow(ticking)
    optimizer = Sgd(model.parameters(), lr=0.1)
    clock = _profile_clock.Clock(2, 0, lambda: None)
    with pytest.raises(_profile_clock.Done), clock.installed():
        for inputs in torch.utils.data.DataLoader(Data()):
            ticking(5)
            model(inputs).sum().backward()
            optimizer.step()
    expected = {"data": 1, "forward": 2, "backward": 3, "wait": 0, "optimizer": 4, "other": 5}
    assert clock.steps == [expected] * 2


def test_step_ends_with_the_optimizer_that_has_stepped_first(ticking):
    model = Slow(ticking)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    clock = _profile_clock.Clock(2, 1, lambda: None)
    with pytest.raises(_profile_clock.Done), clock.installed():
        for _ in range(5):
            model(torch.ones(1)).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [step["forward"] for step in clock.steps] == [2, 2]
