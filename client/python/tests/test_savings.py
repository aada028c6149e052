"""Tests the line at a job's end, and the table of `thalweg run --compare`."""

import json
import logging
from pathlib import Path

import pytest

from thalweg._attach import _savings
from thalweg.cli import _compare, _run, main
from thalweg.cli._compare import Run

STATS = {
    "rounds": 10,
    "raw_bytes": 4e8,
    "wire_bytes_sent": 1e8,
    "link_bytes_sent": 1e8,
    "total_seconds": 1.234,
    "compressed_since": 0,
}
PLACEMENT = "2 shards sum equal shares; 100 MB take 3 s, 1.5 times as long as in a ring; node 0's"


def test_line_has_bytes_seconds_and_both_predictions():
    text = _savings.describe(STATS, PLACEMENT, _savings.Size(nodes=2, workers=4))
    # A ring of the two nodes takes 2 s for 100 MB, of which each link carries once the bytes; the
    # ring through four workers takes 2 * 3 / 4 as many, for 400 MB.
    assert text == (
        "400.0 MB of gradients crossed a node's link as 100.0 MB (4.00x less); waited 1.23 s for "
        "averages (a sum over buckets, which overlap); by the measured links its bytes take 3 s, "
        "and those of plain DDP would have taken 12 s"
    )


def test_shards_that_take_as_long_as_a_ring_are_said_so_without_a_factor():
    placement = PLACEMENT.replace("1.5 times as", "as")
    text = _savings.describe(STATS, placement, _savings.Size(nodes=2, workers=2))
    # A ring of two takes 3 s for 100 MB, and each link carries once the bytes.
    assert text.endswith("its bytes take 3 s, and those of plain DDP would have taken 12 s")


def test_codec_that_has_not_begun_is_said_to_have_compressed_nothing():
    text = _savings.describe(STATS | {"wire_bytes_sent": 4e8}, "", _savings.Size(2, 2))
    assert text.startswith(
        "400.0 MB of gradients crossed a node's link as 400.0 MB (nothing was compressed); waited"
    )
    begun = STATS | {"wire_bytes_sent": 4e8, "compressed_since": 3}
    assert "compressed" not in _savings.describe(begun, "", _savings.Size(2, 2))


def test_what_shards_of_nodes_send_is_on_their_links_too():
    stats = STATS | {"link_bytes_sent": 1.5e8}
    text = _savings.describe(stats, "", _savings.Size(nodes=4, workers=4))
    assert text.startswith(
        "400.0 MB of gradients were sent as 100.0 MB (4.00x less); with the sums of its shard, "
        "which other nodes get, a node's link carried 150.0 MB; waited"
    )


def test_links_that_were_not_measured_give_no_prediction():
    text = _savings.describe(STATS, "2 shards sum equal shares", _savings.Size(2, 2))
    assert text.endswith("(a sum over buckets, which overlap)")


def test_one_node_is_said_to_save_nothing():
    text = _savings.describe(STATS | {"wire_bytes_sent": 0.0}, "", _savings.Size(1, 2))
    assert text.startswith("400.0 MB of gradients, nothing saved: all 2 workers are on one node")


def test_job_without_gradients_or_session_says_nothing(caplog):
    def gone():
        raise RuntimeError("closed")

    size = _savings.Size(2, 2)
    with caplog.at_level(logging.INFO, logger="thalweg"):
        _savings.farewell("x", lambda: STATS | {"rounds": 0}, lambda: "", size)
        _savings.farewell("x", gone, lambda: "", size)
        assert not caplog.records
        _savings.farewell("x", lambda: STATS, lambda: "", size)
    assert caplog.messages[0].startswith("job x: 400.0 MB of gradients")


def test_table_puts_both_runs_side_by_side():
    plain = Run(20, 0.2, 3.8, 0.0, 0.0, "", 0.0)
    ours = Run(20, 0.1, 1.9, 4e6, 1e6, "int8:start=2,feedback=1", 0.01)
    lines = _compare.table(plain, ours, nodes=2, workers=4)
    assert [line.split("  ")[-1].strip() for line in lines[1:7]] == [
        "Thalweg", "20", "100.0", "1.90", "1", "0.01",
    ]  # fmt: skip
    assert "6 *" in lines[5]  # 2 * 3 / 4 of 4 MB
    assert lines[7].startswith("codec int8:start=2,feedback=1; * computed for a ring")
    assert " 0 *" in _compare.table(plain, ours, nodes=1, workers=4)[5]  # crosses no link


@pytest.mark.parametrize("variable", [None, "THALWEG_ENABLE"])
def test_comparison_without_a_codec_is_refused(monkeypatch, capsys, tmp_path, variable):
    if variable:
        monkeypatch.setenv(variable, "0")
    script = tmp_path / "x.py"
    script.write_text("")
    assert main(["run", "--compare", str(script)]) == 2
    assert "--compare needs a codec: give --codec" in capsys.readouterr().err


def test_comparison_with_a_single_worker_is_refused_before_anything_runs(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(_run, "run", lambda plan: pytest.fail(f"ran {plan}"))
    script = tmp_path / "x.py"
    script.write_text("")
    assert main(["run", "--compare", "--codec", "fp16", str(script)]) == 2
    assert "--compare needs workers that average: give --nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables", [{"THALWEG_PS": "adamw"}, {"THALWEG_PS_MODE": "local", "THALWEG_PS_EVERY": "2"}]
)
def test_comparison_refuses_variables_that_win_over_codecs(
    variables, tmp_path, monkeypatch, capsys
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "script.py"
    script.touch()
    assert main(["run", "--nodes", "2", "--compare", "--codec", "fp16", str(script)]) == 2
    assert f"{next(iter(variables))}={next(iter(variables.values()))} wins" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([(3, 0)], "the run with plain DDP has ended with code 3"),
        ([(0, 5), (4, 0)], "the run with codec fp16 has ended with code 4"),
        ([(0, 2)], "the script has made 2 optimizer steps with plain DDP, expected 3"),
        ([(0, 5), (0, 1)], "the script has made 1 optimizer steps with codec fp16, expected 3"),
    ],
)
def test_comparison_names_the_run_that_failed(monkeypatch, capsys, tmp_path, ends, message):
    left = list(ends)

    def run(plan):
        ended, steps = left.pop(0)
        Path(plan.command[2]).write_text(json.dumps({"times": list(range(steps))}))
        return ended

    monkeypatch.setattr(_run, "run", run)
    script = tmp_path / "x.py"
    script.write_text("")
    code = main(["run", "--nproc", "2", "--compare", "--codec", "fp16", str(script)])
    assert code == (ends[-1][0] or 2)
    assert f"thalweg: {message}" in capsys.readouterr().err
    assert not left
