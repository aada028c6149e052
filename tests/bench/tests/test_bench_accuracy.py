"""Tests what `thalweg bench accuracy` runs, keeps and shows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from thalweg.cli import main
from thalweg.examples.fashion_models import MODELS
from thalweg_bench import accuracy
from thalweg_bench.accuracy import AccuracyCase, Training
from thalweg_bench.cli import case_of, make_parser
from thalweg_bench.rows import BenchError

CASE = AccuracyCase(
    models=("cnn", "resnet"), codec=("fp32", "powersgd:rank=4,start=10"), seeds=(1, 2)
)


def make(run, score=0.9, sent=1000, received=1000):
    curve = [{"step": 117.0 * i, "loss": 1 / i, "accuracy": score - 0.01 / i} for i in (1, 2, 3)]
    return Training(*run, score, 60.0, 1000, sent, received, curve)


class Trainer:
    """Replaces the trainings, and records them."""

    def __init__(self, fail=(), most=100):
        self.runs, self.fail, self.most = [], fail, most

    def __call__(self, run):
        if len(self.runs) == self.most:
            raise KeyboardInterrupt
        self.runs.append(run)
        if run in self.fail:
            raise BenchError("it exited with code 1")
        return make(run)


def test_interrupted_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "rows.json"
    first, second, third = Trainer(most=3), Trainer(), Trainer()
    with pytest.raises(KeyboardInterrupt):
        CASE.measure(path, first)
    rows = CASE.measure(path, second)
    assert first.runs + second.runs == CASE.runs()
    assert len(set(CASE.runs())) == 8
    assert rows == [make(run) for run in CASE.runs()] == CASE.measure(path, third)
    assert third.runs == []
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_other_settings_stay_in_the_file_and_out_of_the_result(tmp_path):
    path = tmp_path / "rows.json"
    CASE.measure(path, Trainer())
    rows = replace(CASE, epochs=4).measure(path, Trainer())
    assert {row.epochs for row in rows} == {4}
    assert len(json.loads(path.read_text())) == 16


def test_failed_training_is_named_after_the_others_were_measured(tmp_path):
    path, bad = tmp_path / "rows.json", ("resnet", "fp32", 1, 3)
    with pytest.raises(BenchError, match="failed: resnet, fp32, seed 1; all others"):
        CASE.measure(path, Trainer(fail=[bad]))
    again = Trainer()
    assert len(CASE.measure(path, again)) == 8
    assert again.runs == [bad]


@pytest.mark.parametrize("text", ["[", "3", '[{"model": "cnn"}]'])
def test_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="has no trainings"):
        CASE.measure(path, Trainer())
    assert path.read_text() == text


def test_row_is_what_the_example_says():
    run = ("cnn", "fp16", 1, 3)
    history = {
        "replicas_identical": True,
        "accuracy": 0.9,
        "train_seconds": 60.0,
        "stats": {"raw_bytes": 1000, "wire_bytes_sent": 10, "wire_bytes_received": 20, "rounds": 3},
        "curve": make(run).curve,
    }
    assert accuracy.training_of(run, history) == make(run, sent=10, received=20)
    with pytest.raises(BenchError, match="parameters differ"):
        accuracy.training_of(run, history | {"replicas_identical": False})


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_table_compares_equal_seeds():
    scores = {"fp32": (0.9, 0.91, 0.92), "onebit": (0.88, 0.892, 0.9), "int8": (0.89,)}
    rows = [
        make(("cnn", codec, seed, 3), score, *((1000, 1000) if codec == "fp32" else (30, 40)))
        for codec, by_seed in scores.items()
        for seed, score in enumerate(by_seed, 1)
    ]
    rows.append(make(("vit", "bf16", 1, 3)))
    # onebit's differences are -2, -1.8, -2: mean -1.933, standard deviation 0.11547, / sqrt(3).
    assert [cells(line)[1:] for line in accuracy.table(rows).splitlines()[2:]] == [
        ["`fp32`", "91.00 (90.00 to 92.00)", "-", "-", "-", "1.0000", "1.0000", "60"],
        [
            *("`onebit`", "89.07 (88.00 to 90.00)", "-1.93 ± 0.07", "-1.5", "**no**"),
            *("0.0300", "0.0400", "60"),
        ],
        [
            *("`int8`", "89.00 (89.00 to 89.00)", "-1.00", "-0.5", "**no**"),
            *("0.0300", "0.0400", "60"),
        ],
        ["`bf16`", "90.00 (90.00 to 90.00)", "-", "-", "-", "-", "-", "60"],
    ]


def test_curves_are_drawn_for_each_model(tmp_path):
    accuracy.draw(tmp_path, [make(run, 0.9 + run[2] / 100) for run in CASE.runs()])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["accuracy-cnn.png", "accuracy-resnet.png"]


def test_arguments_become_the_case():
    argv = ["--models", "vit", "--codec", "fp16", "--codec", "powersgd:start=10,rank=4"]
    argv += ["--codec", "int8; elems<1000=fp32", "--seeds", "5,6", "--json", "rows.json"]
    case = case_of(make_parser().parse_args(["accuracy", *argv]))
    *codecs, policy = case.codec
    assert (case.models, codecs) == (("vit",), ["fp16", "powersgd:rank=4,start=10"])
    assert policy.startswith("int8:")
    assert policy.endswith(";elems<1000=fp32")
    assert (case.seeds, case.epochs, case.json) == ((5, 6), 3, Path("rows.json"))


def test_command_shows_the_table_and_keeps_the_rows(tmp_path, monkeypatch, capsys):
    path, trainer = tmp_path / "rows.json", Trainer()
    monkeypatch.setattr(accuracy, "_train", trainer)
    for epochs in ("1", "2"):
        argv = ["--models", "vit", "--codec", "fp16", "--seeds", "5,6", "--json", str(path)]
        assert main(["bench", "accuracy", *argv, "--epochs", epochs]) == 0
    assert [entry["epochs"] for entry in json.loads(path.read_text())] == [1, 1, 2, 2]
    assert "| `fp16` |" in capsys.readouterr().out


def test_models_are_those_of_the_example():
    assert tuple(MODELS) == accuracy.MODELS
