"""Tests what `thalweg bench accuracy` runs, keeps and shows."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from thalweg.cli import main
from thalweg.examples.fashion_models import MODELS
from thalweg_bench import accuracy, accuracy_report
from thalweg_bench.accuracy import Case, Row, Run
from thalweg_bench.cli import _accuracy as arguments
from thalweg_bench.cli import _types as types
from thalweg_bench.rows import BenchError

CASE = Case(("cnn", "resnet"), ("fp32", "powersgd:rank=4,start=10"), (1, 2), 3)


def make(run, score=0.9, sent=1000, received=1000):
    curve = [{"step": 117.0 * i, "loss": 1 / i, "accuracy": score - 0.01 / i} for i in (1, 2, 3)]
    return Row(
        **asdict(run),
        accuracy=score,
        seconds=60.0,
        raw_bytes=1000,
        wire_bytes_sent=sent,
        wire_bytes_received=received,
        curve=curve,
    )


class Trainer:
    """Replaces the trainings, and records them."""

    def __init__(self, fail=()):
        self.runs = []
        self.fail = fail

    def __call__(self, run):
        self.runs.append(run)
        if run in self.fail:
            raise BenchError("it exited with code 1")
        return make(run)


def test_codecs_of_a_model_and_seed_follow_each_other():
    runs = [(run.seed, run.model, run.codec.partition(":")[0]) for run in CASE.runs()]
    assert runs[:5] == [
        (1, "cnn", "fp32"),
        (1, "cnn", "powersgd"),
        (1, "resnet", "fp32"),
        (1, "resnet", "powersgd"),
        (2, "cnn", "fp32"),
    ]
    assert len(runs) == 8


def test_interrupted_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "rows.json"

    def interrupt(run):
        if len(first.runs) == 3:
            raise KeyboardInterrupt
        return first(run)

    first = Trainer()
    with pytest.raises(KeyboardInterrupt):
        accuracy.measure(CASE, path, interrupt)
    second = Trainer()
    rows = accuracy.measure(CASE, path, second)
    assert first.runs + second.runs == CASE.runs()
    assert rows == [make(run) for run in CASE.runs()]
    third = Trainer()
    assert accuracy.measure(CASE, path, third) == rows
    assert third.runs == []
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_other_settings_stay_in_the_file_and_out_of_the_result(tmp_path):
    path = tmp_path / "rows.json"
    longer = replace(CASE, epochs=4)
    accuracy.measure(CASE, path, Trainer())
    rows = accuracy.measure(longer, path, Trainer())
    assert {row.epochs for row in rows} == {4}
    assert len(json.loads(path.read_text())) == 16


def test_failed_training_is_named_after_the_others_were_measured(tmp_path):
    path = tmp_path / "rows.json"
    bad = Run("resnet", "fp32", 1, 3)
    with pytest.raises(BenchError, match="failed: resnet, fp32, seed 1; all others"):
        accuracy.measure(CASE, path, Trainer(fail=[bad]))
    again = Trainer()
    assert len(accuracy.measure(CASE, path, again)) == 8
    assert again.runs == [bad]


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "is not JSON"), ("{}", "expected a list"), ('[{"model": "cnn"}]', "expected a list")],
)
def test_file_of_something_else_is_refused(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        accuracy.measure(CASE, path, Trainer())
    assert path.read_text() == text


def test_time_left_is_that_of_the_same_model(tmp_path, capsys):
    path = tmp_path / "rows.json"
    six_epochs = Case(("cnn",), ("fp32",), (1, 2, 3, 4, 5), 6)
    accuracy.measure(Case(("cnn",), ("fp16",), (1,), 3), path, Trainer())
    capsys.readouterr()
    accuracy.measure(six_epochs, path, Trainer())
    # Three epochs take 60 s; Trainer's six epochs take as long, which the average learns.
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == f"bench: 5 trainings to do, 0 known from {path}"
    assert shown[1] == "bench: cnn, fp32, seed 1 (1/5), about 10 min left"
    assert shown[2] == "bench: cnn, fp32, seed 1: accuracy 0.9000, 60 s"


def test_row_is_what_the_example_says():
    run = Run("cnn", "fp16", 1, 3)
    stats = {"raw_bytes": 1000, "wire_bytes_sent": 10, "wire_bytes_received": 20, "rounds": 3}
    history = {
        "replicas_identical": True,
        "accuracy": 0.9,
        "train_seconds": 60.0,
        "stats": stats,
        "curve": make(run).curve,
    }
    assert accuracy.make_row(run, history) == make(run, sent=10, received=20)
    with pytest.raises(BenchError, match="parameters differ"):
        accuracy.make_row(run, history | {"replicas_identical": False})


def test_table_compares_equal_seeds():
    scores = {"fp32": (0.9, 0.91, 0.92), "onebit": (0.88, 0.892, 0.9), "int8": (0.89, None, None)}
    rows = [
        make(Run("cnn", codec, seed, 3), score, *((1000, 1000) if codec == "fp32" else (30, 40)))
        for codec, by_seed in scores.items()
        for seed, score in enumerate(by_seed, 1)
        if score is not None
    ]
    lines = accuracy_report.table(rows).splitlines()
    # onebit's differences are -2, -1.8, -2: mean -1.933, standard deviation 0.11547, / sqrt(3).
    assert lines[2:] == [
        "| cnn | `fp32` | 91.00 (90.00 to 92.00) | - | - | - | 1.0000 | 1.0000 | 60 |",
        "| cnn | `onebit` | 89.07 (88.00 to 90.00) | -1.93 ± 0.07 | -1.5 | **no** | 0.0300 | "
        "0.0400 | 60 |",
        "| cnn | `int8` | 89.00 (89.00 to 89.00) | -1.00 | -0.5 | **no** | 0.0300 | 0.0400 | 60 |",
    ]
    assert {line.count(" | ") for line in lines} == {8}


def test_table_without_fp32_compares_nothing():
    (line,) = accuracy_report.table([make(Run("vit", "bf16", 1, 3))]).splitlines()[2:]
    assert line == "| vit | `bf16` | 90.00 (90.00 to 90.00) | - | - | - | - | - | 60 |"


def test_curves_are_drawn_for_each_model(tmp_path):
    rows = [make(run, 0.9 + run.seed / 100) for run in CASE.runs()]
    for folder in ("once", "again"):
        accuracy_report.draw(tmp_path / folder, rows)
    names = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert names == ["accuracy-cnn.png", "accuracy-resnet.png"]
    for name in names:
        drawn = (tmp_path / "once" / name).read_bytes()
        assert 5_000 < len(drawn) < 100_000
        assert (tmp_path / "again" / name).read_bytes() == drawn


def test_arguments_become_the_case(tmp_path, monkeypatch, capsys):
    cases = []

    def measure(case, path):
        cases.append((case, path))
        return [make(run) for run in case.runs()]

    monkeypatch.setattr(accuracy, "measure", measure)
    path = tmp_path / "rows.json"
    argv = ["--models", "vit", "--codec", "fp16", "--codec", "powersgd:start=10,rank=4"]
    argv += ["--seeds", "5,6", "--epochs", "2", "--json", str(path)]
    assert main(["bench", "accuracy", *argv]) == 0
    codecs = ("fp16", "powersgd:rank=4,start=10")
    assert cases == [(Case(("vit",), codecs, (5, 6), 2), path)]
    assert "| vit | `powersgd:rank=4,start=10` |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--codec", "zip"], "the codec is 'zip'"),
        (["--codec", "fp32;x"], "the codec: rule 1 'x'"),
        (["--models", "vgg"], "unknown: vgg; known are cnn, resnet, vit"),
        ([], "the following arguments are required: --json"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "accuracy", *argv])
    assert message in capsys.readouterr().err


def test_policies_are_known_by_their_whole_text():
    short = types.codec("int8; elems<1000=fp32")
    assert short == types.codec("int8:start=2,feedback=1;elems<1000=fp32")
    assert short.startswith("int8:")
    assert short.endswith(";elems<1000=fp32")
    assert accuracy_report.table([make(Run("cnn", short, 1, 3))]).count(f"| `{short}` |") == 1


def test_default_codecs_have_their_short_names():
    assert [types.codec(text) for text in arguments.CODECS] == list(arguments.CODECS)


@pytest.mark.parametrize("name", arguments.MODELS)
def test_models_tell_ten_classes_apart(name):
    torch.manual_seed(1)
    model = MODELS[name]()
    assert model(torch.randn(3, 1, 28, 28)).shape == (3, 10)
    assert 70_000 < sum(parameter.numel() for parameter in model.parameters()) < 300_000


def test_models_are_those_of_the_example():
    assert tuple(MODELS) == arguments.MODELS
