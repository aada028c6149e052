"""Tests tables and plots from measurements."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from thalweg._settings._config import ConfigError
from thalweg.cli import main
from thalweg_bench import reach, report
from thalweg_bench.results import Results
from thalweg_bench.rows import Row

PERFORMANCE = Path(__file__).parents[3] / "docs" / "measurements" / "performance.md"
MACHINE = {
    "date": "2026-01-02 03:04 UTC",
    "cores": 2,
    "commit": None,
    "cases": {
        "scale": {"date": "2026-01-02 03:00 UTC", "seconds": 90, "commands": ["a b", "c"]},
        "allreduce-4x250mbit": {"date": "2026-01-01", "seconds": 70, "commands": ["d"]},
    },
}


def row(case, system, median, bound=None, size=102_228_128):
    return Row(case, system, size, median, median * 0.9, median * 1.1, bound)


def used(process, cpu=1.0, rss=50.0, sent=100.0, case="c"):
    sent = None if process.startswith("worker") else sent
    fields = {"case": case, "process": process, "cpu_s_per_gb": cpu, "rss_mb": rss}
    return fields | {"sent_mb": sent}


def results(rows=None, resources=None):
    return Results(rows or {}, resources or {}, MACHINE)


def everything():
    """Returns made-up results in which every target is reached."""
    rows = {}
    for name, gloo in (
        ("allreduce-4x250mbit", 1.5),
        ("allreduce-4x500mbit", 1.5),
        ("allreduce-4x1gbit", 1.5),
        ("allreduce-4x2gbit", 1.5),
        ("allreduce-8x100mbit", 1.75),
        ("allreduce-4x2workers-250mbit", 1.75),
    ):
        rows[name] = [
            row("c", "thalweg", 3.3, 3.2),
            row("c", "gloo", gloo * 3.3, gloo * 3.2),
            row("c", "iperf3", 3.2, 3.1),
        ]
    for name in ("local-2workers", "local-4workers"):
        rows[name] = [row("c", "thalweg", 0.03), row("c", "gloo", 0.06)]
    for name, peer in (
        ("step-resnet50", "torch-fp16"),
        ("step-swin-t", "torch-fp16"),
        ("step-bert-base", "torch-fp16"),
        ("step-4x2workers-fp32", "ddp"),
    ):
        parts = [("step", 0.2), ("communication", 0.0)]
        rows[name] = [
            row(f"c {part}", system, median + more, 1.6)
            for part, more in parts
            for system, median in (("thalweg", 1.7), (peer, 3.0))
        ]
    rows["sweep-1gbit"] = [
        row("c", system, size / 1e8, size / 1.25e8, size)
        for size in (4096, 65536, 1 << 20)
        for system in ("thalweg", "gloo")
    ]
    rows["scale"] = [
        row(f"{nodes} nodes", system, 1.0 + nodes / 1000, 0.98)
        for nodes in (2, 4, 8, 16)
        for system in ("thalweg", "iperf3")
    ]
    rows["latency"] = [
        row(f"c {percentile}", system, 0.0005) for percentile in ("p50", "p99")
        for system in ("thalweg", "gloo")
    ]  # fmt: skip
    rows["micro"] = [
        row("codec_bench/BM_FoldPayloads/fp16/4/8192", "thalweg", 2e-4, size=5 << 20),
        row("codec_bench/BM_Memcpy", "memcpy", 1e-4, size=2 << 20),
        row("reduce_bench/BM_FoldMean/fp16/4/8388608", "thalweg", 3.4e-3, size=80 << 20),
        row("reduce_bench/BM_Memcpy/33554432", "memcpy", 3.7e-3, size=64 << 20),
        row("frame_codec_bench/BM_ParseFrame/9", "thalweg", 1e-6, size=0),
    ]
    servers = [used("aggregator max"), used("sidecar max"), used("worker max")]
    names = ("allreduce-4x250mbit", "allreduce-4x2workers-250mbit", "fp16-4x1gbit", "memory")
    resources = dict.fromkeys(names, servers)
    resources["soak"] = [
        used(process, case=f"c, steps {steps}")
        for steps in ("1 to 1000", "1001 to 10000")
        for process in ("aggregator max", "sidecar max")
    ]
    return Results(rows, resources, MACHINE)


def write_folder(folder, found):
    for name, rows in found.rows.items():
        (folder / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows]))
    for name, entries in found.resources.items():
        (folder / f"{name}.resources.json").write_text(json.dumps(entries))
    (folder / "machine.json").write_text(json.dumps(found.machine))


def test_every_target_can_be_measured_and_met():
    for target in reach.targets():
        measured = target.measure(everything())
        assert measured is not None, target
        assert measured.met in ((None,) if target.target == "reported" else (True,)), target


def test_nothing_is_met_by_what_was_not_measured():
    assert all(target.measure(results()) is None for target in reach.targets())


@pytest.mark.parametrize(
    ("median", "text", "met"), [(1.0, "0.950", True), (1.001, "0.949", False), (0.5, "1.900", True)]
)
def test_share_of_the_bound(median, text, met):
    found = results({"allreduce-4x1gbit": [row("c", "thalweg", median, 0.95)]})
    measured = reach.of_bound(found, "allreduce-4x1gbit", 0.95)
    assert (measured.text, measured.met) == (text, met)


def test_how_many_times_a_peer_takes_is_of_the_named_part():
    rows = [row("c step", "thalweg", 5.0), row("c communication", "thalweg", 2.0)]
    rows += [row("c step", "ddp", 6.0), row("c communication", "ddp", 3.0)]
    found = results({"step-resnet50": rows})
    measured = reach.versus(found, "step-resnet50", "ddp", 1.6, " communication")
    assert (measured.text, measured.met) == ("1.50x", False)


@pytest.mark.parametrize(("two", "met"), [(100.5, True), (97.0, False), (175.0, False)])
def test_bytes_leaving_must_not_depend_on_the_workers(two, met):
    found = results(
        resources={
            "allreduce-4x250mbit": [used("sidecar max", sent=100.0)],
            "allreduce-4x2workers-250mbit": [used("sidecar max", sent=two)],
        }
    )
    assert reach.bytes_leaving(found).met is met


def test_fold_is_compared_with_the_copy_by_bytes_per_second():
    rows = [row("a/BM_Fold", "thalweg", 4.0, size=600), row("b/BM_Memcpy", "memcpy", 9.0, size=1)]
    rows += [row("a/BM_Memcpy", "memcpy", 1.0, size=200)]
    measured = reach.fold(results({"micro": rows}), "a/BM_Fold", "a/BM_Memcpy", 0.7)
    assert (measured.text, measured.met) == ("0.75", True)


def test_scaling_is_the_ratio_of_the_slowest_to_the_fastest():
    found = results({"scale": [row("c", "thalweg", median) for median in (1.0, 1.05, 1.12)]})
    measured = reach.flat(found)
    assert measured.text.startswith("1.120x")
    assert not measured.met


def test_memory_may_be_what_the_window_needs():
    # 4 nodes x 16 chunks of 256 KiB, and 102 MB twice.
    assert reach.shard_memory_mb() == pytest.approx(64 + 16.777216)
    assert reach.sidecar_memory_mb() == pytest.approx(64 + 2 * 102.228128)


def test_growth_is_what_came_after_the_first_steps():
    entries = [
        used("sidecar max", rss=rss, case=f"c, steps {steps}")
        for rss, steps in ((100.0, "1 to 1000"), (106.0, "1001 to 10000"))
    ]
    measured = reach.growth(results(resources={"soak": entries}), "sidecar max")
    assert (measured.text, measured.met) == ("1.060x (100.0 → 106.0 MB)", False)


def test_tables_name_what_is_missed_and_what_is_missing():
    rows = [row("c", "thalweg", 2.0, 1.0), row("c", "gloo", 3.0, 1.5)]
    blocks = report.make_blocks(results({"allreduce-4x250mbit": rows}))
    reached = blocks["reach"].splitlines()
    assert "| case | target | measured | met |" in reached
    assert any("≥ 0.95 of size/rate | 0.500 | **no** |" in line for line in reached)
    assert any("≥ 1.42x Gloo | 1.50x | yes |" in line for line in reached)
    assert any(", 500 Mbit/s | ≥ 1.42x Gloo | not measured | - |" in line for line in reached)
    assert (
        "| allreduce-4x250mbit | c | gloo | 102.228 | 3000.000 | 2700.000 | 3300.000 | 0.500 | "
        "1.50x |" in blocks["rows"]
    )
    assert "- date: 2026-01-02 03:04 UTC" in blocks["machine"]
    assert "| scale | `a b`<br>`c` | 2026-01-02 03:00 UTC | 90 |" in blocks["machine"]
    assert "commit" not in blocks["machine"]


def test_every_table_line_has_as_many_cells_as_its_head():
    for name, block in report.make_blocks(everything()).items():
        widths = {line.count(" | ") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) == 1, name


def test_blocks_are_filled_and_prose_is_kept():
    text = (
        "# A\n<!-- generated: a -->\nold\n<!-- end -->\nprose\n"
        "<!-- generated: b -->\n<!-- end -->\n"
    )
    filled = report.fill(text, {"a": "1", "b": "2\n3"}, "x.md")
    assert filled == (
        "# A\n<!-- generated: a -->\n1\n<!-- end -->\nprose\n"
        "<!-- generated: b -->\n2\n3\n<!-- end -->\n"
    )
    assert report.fill(filled, {"a": "1", "b": "2\n3"}, "x.md") == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: c -->\n<!-- end -->", "x.md has a block 'c', which nothing generates"),
        ("prose", "x.md has 0 blocks '<!-- generated: a -->', expected one"),
        ("<!-- generated: a -->\n<!-- end -->\n" * 2, "x.md has 2 blocks"),
        ("\n<!-- generated: a -->\n", "x.md: the block 'a' has no '<!-- end -->'"),
        ("\n<!-- end -->", "x.md:2: expected '<!-- generated: NAME -->', got '<!-- end -->'"),
        (
            "<!-- generated: a -->\n<!-- generated: a -->",
            "x.md:2: expected '<!-- end -->' of 'a', got '<!-- generated: a -->'",
        ),
    ],
)
def test_other_marks_are_refused(text, message):
    with pytest.raises(ConfigError) as raised:
        report.fill(text, {"a": "1"}, "x.md")
    assert message in str(raised.value)


def test_page_of_the_repository_has_the_blocks(tmp_path):
    write_folder(tmp_path, everything())
    page = tmp_path / "performance.md"
    page.write_text(PERFORMANCE.read_text(encoding="utf-8"), encoding="utf-8")
    argv = ["bench", "report", str(tmp_path), "--markdown", str(page)]
    assert main(argv) == 0
    first = page.read_text(encoding="utf-8")
    assert "| scale | 16 nodes | thalweg |" in first
    assert main(argv) == 0
    assert page.read_text(encoding="utf-8") == first


def test_plots_of_the_page_are_drawn_small_and_always_the_same(tmp_path):
    write_folder(tmp_path, everything())
    for folder in ("performance", "again"):
        assert main(["bench", "report", str(tmp_path), "--plots", str(tmp_path / folder)]) == 0
    for path in (tmp_path / "performance").iterdir():
        assert 5_000 < path.stat().st_size < 60_000
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
        assert f"(performance/{path.name})" in PERFORMANCE.read_text(encoding="utf-8")
    assert len(list((tmp_path / "performance").iterdir())) == 4


def test_plot_without_its_case_is_left_out_with_a_word(tmp_path, capsys):
    rows = {"scale": everything().rows["scale"]}
    write_folder(tmp_path, results(rows))
    assert main(["bench", "report", str(tmp_path), "--plots", str(tmp_path / "p")]) == 0
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["scale.png"]
    assert "no sweep.png: its cases are not measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("scale.json", "[", "scale.json is not JSON"),
        ("scale.json", '[{"case": 1}]', "scale.json: expected a list of objects with bound_s"),
        ("scale.resources.json", "{}", "expected a list of objects with case, cpu_s_per_gb"),
        ("machine.json", "[]", "machine.json: expected an object with 'cases'"),
    ],
)
def test_broken_measurements_are_named(tmp_path, capsys, name, text, message):
    write_folder(tmp_path, everything())
    (tmp_path / name).write_text(text)
    assert main(["bench", "report", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_empty_folder_is_refused(tmp_path, capsys):
    assert main(["bench", "report", str(tmp_path)]) == 1
    assert "run `thalweg bench suite --out" in capsys.readouterr().err
