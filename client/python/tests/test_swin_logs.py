"""Tests the Swin example's logs: written, parsed and drawn."""

import json

import pytest
from PIL import Image

from thalweg.examples.swin import SwinError, logger, plot
from thalweg.examples.swin.parser import parse_file

ENTRY = {"kind": "train", "data_seconds": 0.01, "images_per_second": 40.0, "memory_mb": 800.0}


def write(root, suffix, *, steps=(0.9, 0.2, 0.4), model_tag="tiny_a", seed="seed0", node="0"):
    """Writes the log of a run whose intervals took these seconds per step."""
    folder = root / model_tag / suffix / seed / node
    log = logger.create_logger(folder, shown=False, name=f"test {folder}")
    logger.log_params(log, {"workers": 2})
    for number, seconds in enumerate(steps, 1):
        measured = {"step": 10 * number, "step_seconds": seconds, "loss": 3.0 / number}
        logger.log_metrics(log, {**ENTRY, **measured, "sent_mb": 39.0 * seconds})
    logger.log_metrics(
        log, {"kind": "validation", "step": 10 * len(steps), "top1": 50.0, "top5": 100.0}
    )
    for handler in log.handlers:
        handler.close()
    return folder / "log"


def test_log_is_parsed_as_it_was_written(tmp_path):
    parsed = parse_file(write(tmp_path, "baseline"))
    assert parsed.params == {"workers": 2}
    assert parsed.column("step_seconds") == [0.9, 0.2, 0.4]
    assert parsed.column("loss") == [3.0, 1.5, 1.0]
    assert [entry["top1"] for entry in parsed.validation] == [50.0]


def test_summary_leaves_out_the_first_interval(tmp_path):
    summary = parse_file(write(tmp_path, "baseline")).summary()
    assert summary.step_seconds == pytest.approx(0.3)
    assert summary.sent_mb == pytest.approx(0.3 * 39)
    assert (summary.workers, summary.loss, summary.top1) == (2, 1.0, 50.0)


def test_latest_of_several_runs_counts(tmp_path):
    write(tmp_path, "baseline")
    assert parse_file(write(tmp_path, "baseline", steps=(7.0,))).column("step_seconds") == [7.0]


def test_incomplete_last_line_is_ignored_and_other_garbage_refused(tmp_path):
    path = write(tmp_path, "baseline")
    whole = path.read_text()
    path.write_text(whole + '2026-01-01 00:00:00,000 INFO metrics {"kind": "tr')
    assert len(parse_file(path).train) == 3
    path.write_text(whole + "2026-01-01 00:00:00,000 INFO metrics {\nmore\n")
    with pytest.raises(SwinError, match="log:6: the metrics are not JSON"):
        parse_file(path)


def test_what_is_no_log_is_refused_by_its_path(tmp_path):
    with pytest.raises(SwinError, match=r"nothing cannot be read: No such file"):
        parse_file(tmp_path / "nothing")
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(SwinError, match="other is no log of a training"):
        parse_file(tmp_path / "other")
    with pytest.raises(SwinError, match="has no metrics yet"):
        parse_file(write(tmp_path, "early", steps=()))


def test_runs_are_found_by_model_and_tag_suffix_and_output_suffix(tmp_path):
    write(tmp_path, "baseline")
    write(tmp_path, "optimised")
    write(tmp_path, "optimised", seed="seed1")
    write(tmp_path, "optimised", node="1")
    write(tmp_path, "baseline", model_tag="tiny_b")
    found = plot.traverse(tmp_path)
    names = {tag: {s: list(logs) for s, logs in runs.items()} for tag, runs in found.items()}
    assert names == {
        "tiny_a": {"baseline": ["seed0"], "optimised": ["seed0", "seed1"]},
        "tiny_b": {"baseline": ["seed0"]},
    }


def test_run_without_the_log_of_its_first_node_is_named(tmp_path):
    write(tmp_path, "baseline")
    path = write(tmp_path, "optimised", node="1")
    with pytest.raises(SwinError) as caught:
        plot.traverse(tmp_path)
    run = path.parents[1]
    assert str(caught.value).startswith(f"{run} has no log of node 0, only of 1: expected {run}/0/")


def test_missing_or_empty_output_is_named(tmp_path, capsys):
    with pytest.raises(SwinError, match=r"there is no folder .*missing"):
        plot.traverse(tmp_path / "missing")
    with pytest.raises(SwinError, match="has no runs: expected MODEL_TAG/SUFFIX/"):
        plot.traverse(tmp_path)
    assert plot.main(["--output", str(tmp_path)]) == 2
    assert "has no runs" in capsys.readouterr().err


def test_each_model_and_tag_gets_a_picture_a_table_and_json(tmp_path, capsys):
    write(tmp_path / "out", "baseline", steps=(1.0, 1.0))
    write(tmp_path / "out", "optimised", steps=(0.25, 0.25))
    write(tmp_path / "out", "baseline", model_tag="tiny_b")
    assert plot.main(["--output", str(tmp_path / "out"), "--pictures", str(tmp_path)]) == 0
    assert "| optimised | 2 | 0.250 | 4.00x |" in capsys.readouterr().out
    for model_tag in ("tiny_a", "tiny_b"):
        with Image.open(tmp_path / f"{model_tag}.png") as picture:
            assert picture.width > 800
    rows = json.loads((tmp_path / "tiny_a.json").read_text())
    assert rows["optimised"]["seed0"]["step_seconds"] == 0.25


def test_switch_of_torchacc_is_answered_with_what_runs_in_its_place(tmp_path, monkeypatch):
    log = logger.create_logger(tmp_path, shown=False, name="switch")
    monkeypatch.delenv("USE_TORCHACC", raising=False)
    assert not logger.enable_torchacc_compiler(log)
    monkeypatch.setenv("USE_TORCHACC", "1")
    assert logger.enable_torchacc_compiler(log)
    assert logger.enable_torchacc_kernel(log)
    for handler in log.handlers:
        handler.close()
    said = (tmp_path / "log").read_text()
    assert said.count("USE_TORCHACC=1: ") == 2
    assert "Thalweg's hook in the place of TorchAcc's compiler" in said
