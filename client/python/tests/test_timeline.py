import errno
import json
from pathlib import Path

import pytest
from made_traces import MS, Host, Writer, compare_clocks, hosts, job

from thalweg._settings._config import ConfigError
from thalweg.cli import main
from thalweg.timeline import check, files, merge, spans, torch_profile


@pytest.fixture(name="writers")
def _writers():
    on = hosts()
    writers = job(on)
    compare_clocks(writers, on)
    return writers


def merged(tmp_path, writers, profiles=()):
    folder = tmp_path / "traces"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for writer in writers:
        writer.write(folder)
    result = merge.merge([files.read(path) for path in files.find([folder])], profiles)
    path = tmp_path / "merged.json"
    result.write(path)
    return result, path


def find(path, phase, **args):
    """Returns spans of the merged trace."""
    found = [s for s in spans.read(path).spans if s.phase == phase]
    return [s for s in found if args.items() <= s.args.items()]


def test_all_hosts_come_to_true_time(tmp_path, writers):
    _, path = merged(tmp_path, writers)
    (fold,) = find(path, "fold", part_round=1, chunk=0)
    for node in range(2):
        (send,) = find(path, "send", node=node, round=1, chunk=0)
        (wait,) = find(path, "wait", node=node, round=1)
        assert fold.begin - send.begin == pytest.approx(12_000, abs=0.01)
        assert wait.end - fold.end == pytest.approx(20_000, abs=0.01)
    first = min(span.begin for span in spans.read(path).spans)
    assert first == 0


def test_second_shard_is_reached_through_a_node_that_has_compared_both(tmp_path, writers):
    other = Host("d", ahead=-3 * MS)
    shard = Writer(other, "aggregator", 300, {"num_nodes": 2})
    shard.span("shard", "fold", 150 * MS, 151 * MS, part_round=1, chunk=7, shard=1)
    writers[1].offset(other, 70 * MS, 4 * MS, 2 * MS)
    writers[3].offset(other, 70 * MS, 600_000, 300_000)
    result, path = merged(tmp_path, [shard, *writers])
    (fold,), (first,) = find(path, "fold", chunk=7), find(path, "fold", chunk=0, part_round=1)
    assert fold.begin - first.begin == pytest.approx(32_000, abs=0.01)
    errors = {process.name: process.error_us for process in result.processes}
    assert errors["shard 1 (d 300)"] == pytest.approx(200 + 300, abs=0.01)
    assert errors["shard 0 (c 200)"] == 0


@pytest.mark.parametrize("there", [0.0, 0.2, 1.0])
def test_error_of_clocks_is_no_more_than_what_is_said(tmp_path, there):
    on = hosts()
    writers = job(on)
    compare_clocks(writers, on, there)
    result, path = merged(tmp_path, writers)
    errors = {p.name: p.error_us for p in result.processes}
    # half of 0.4 ms: the best comparison counts
    assert max(errors.values()) == pytest.approx(200.0, abs=0.01)
    (fold,) = find(path, "fold", part_round=1, chunk=0)
    (send,) = find(path, "send", node=0, round=1, chunk=0)
    wrong = fold.begin - send.begin - 12_000
    assert abs(wrong) == pytest.approx(abs(there - 0.5) * 400, abs=0.01)


def test_clock_that_drifts_is_followed(tmp_path):
    """Uses 50 ppm, as without a time service: 30 ms in ten minutes."""
    on = hosts(drift=50e-6)
    writers = job(on, rounds=1)
    minutes = 600_000 * MS
    for true in range(60 * MS, minutes, 2_000 * MS):
        writers[1].offset(on[2], true, 400_000, 200_000)
        writers[3].offset(on[2], true, 400_000, 200_000)
    for writer, phase in ((writers[1], "send"), (writers[-1], "fold")):
        what = {"round": 9, "part_round": 9, "chunk": 0, "shard": 0}
        writer.span("shard" if phase == "fold" else "sidecar", phase, minutes, minutes + MS, **what)
    _, path = merged(tmp_path, writers)
    (send,), (fold,) = find(path, "send", part_round=9), find(path, "fold", part_round=9)
    assert fold.begin - send.begin == pytest.approx(0, abs=600)  # 10 s of drift, at the end


def test_host_without_comparison_is_brought_by_the_wall_clock_and_said_so(tmp_path):
    on = hosts()
    writers = job(on)
    compare_clocks(writers, on)
    writers[3].lines = [e for e in writers[3].lines if e["name"] != "thalweg_offset"]
    result, path = merged(tmp_path, writers)
    assert [p.error_us is None for p in result.processes] == [False, False, True, True, False]
    assert sum("nobody has compared" in warning for warning in result.warnings) == 2
    (fold,) = find(path, "fold", part_round=1, chunk=0)
    (send,) = find(path, "send", node=1, round=1, chunk=0)
    # Host b's wall clock is 4 ms behind that of the shard's host.
    assert fold.begin - send.begin == pytest.approx(12_000 + 4_000, abs=0.01)
    assert check.problems(spans.read(path)) == []


def test_tracks_are_named_and_ordered_by_node_and_rank(tmp_path, writers):
    result, _ = merged(tmp_path, writers[::-1])
    assert [process.name for process in result.processes] == [
        "node 0 worker 0 (a 100)",
        "node 0 sidecar (a 200)",
        "node 1 worker 1 (b 101)",
        "node 1 sidecar (b 200)",
        "shard 0 (c 200)",
    ]
    assert len({process.number for process in result.processes}) == 5


def test_arrows_lead_from_every_node_to_the_fold_and_back(tmp_path, writers):
    result, _ = merged(tmp_path, writers)
    begins = {e["id"]: e for e in result.events if e["ph"] == "s"}
    ends = {e["id"]: e for e in result.events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * 2 * 2 * 2  # there and back, nodes, chunks, rounds
    assert all(begins[i]["ts"] < ends[i]["ts"] for i in begins)


def test_whole_trace_is_good(tmp_path, writers):
    _, path = merged(tmp_path, writers)
    assert check.problems(spans.read(path)) == []


@pytest.mark.parametrize(
    ("writer", "phase"),
    [
        (0, "copy_in"),
        (0, "wait"),
        (2, "copy_out"),
        (1, "wait_workers"),
        (3, "exchange"),
        (1, "return"),
        (1, "reduce"),
        (3, "send"),
        (1, "wire"),
        (3, "decode"),
        (4, "wait_for_slowest"),
        (4, "fold"),
        (4, "deliver"),
    ],
)
def test_missing_phase_is_named(tmp_path, writers, writer, phase):
    lines = writers[writer].lines
    lines.remove([line for line in lines if line["name"] == phase and line["ph"] in "Xb"][-1])
    _, path = merged(tmp_path, writers)
    (problem,) = check.problems(spans.read(path))
    assert problem.endswith(f"has no {phase}")
    assert "job night" in problem
    assert "round 2" in problem


def test_missing_process_is_noticed(tmp_path, writers):
    _, path = merged(tmp_path, [*writers[:2], *writers[3:]])
    found = check.problems(spans.read(path))
    assert len(found) == 3 * 2
    assert all("worker 1 has no" in problem for problem in found)


@pytest.mark.parametrize("apart", [False, True])
def test_job_without_any_workers_trace_is_named(tmp_path, writers, apart):
    if apart:
        writers[-1].span("shard", "update", 0, MS, part_round=1, chunk=0, shard=0, version=1)
    _, path = merged(tmp_path, [writers[1], writers[3], writers[4]])
    assert check.problems(spans.read(path)) == ["job night: no worker's trace"]


def test_span_that_ends_before_it_begins_is_a_problem(tmp_path, writers):
    writers[4].span("shard", "fold", 119 * MS, 118 * MS, part_round=1, chunk=0, shard=0)
    _, path = merged(tmp_path, writers)
    found = check.problems(spans.read(path))
    assert len(found) == 1
    assert "ends 1000.000 us before it begins" in found[0]


@pytest.mark.parametrize(("early", "problems"), [(11, 0), (13, 2)])
def test_fold_before_its_contributions_is_a_problem_beyond_the_clocks_error(
    tmp_path, early, problems
):
    """Uses comparisons of 0.4 ms; the fold begins 12 ms after the sending, less `early`."""
    on = hosts()
    writers = job(on, rounds=1)
    compare_clocks(writers, on)
    for line in writers[4].lines:
        if line["name"] == "fold" and line["args"]["chunk"] == 0:
            line["ts"] -= early * 1e3
    _, path = merged(tmp_path, writers)
    found = check.problems(spans.read(path))
    assert len(found) == problems
    assert all("before send" in problem for problem in found)


def test_nodes_that_may_be_apart_get_weights_before_their_round_is_folded(tmp_path):
    on = hosts()
    writers = job(on, rounds=1)
    compare_clocks(writers, on)
    for line in writers[4].lines:
        if line["name"] == "fold":
            line["ts"] -= 13e3
    where = {"part_round": 1, "chunk": 0, "shard": 0}
    writers[4].span("shard", "update", 150 * MS, 151 * MS, **where)
    assert check.problems(spans.read(merged(tmp_path, writers)[1]))
    writers[4].span("shard", "update", 151 * MS, 152 * MS, **where, version=1)
    assert not check.problems(spans.read(merged(tmp_path, writers)[1]))


def test_dropped_spans_are_said(tmp_path, writers):
    writers[0].meta("thalweg_dropped", {"spans": 3})
    writers[0].meta("thalweg_dropped", {"spans": 5})
    result, path = merged(tmp_path, writers)
    assert any("5 spans were dropped" in warning for warning in result.warnings)
    assert "5 spans were dropped" in check.problems(spans.read(path))[0]


def test_node_alone_needs_no_shard(tmp_path):
    place = {"node": 0, "num_nodes": 1}
    worker = Writer(hosts()[0], "worker", 1, {"rank": 0, "world_size": 1, **place})
    sidecar = Writer(hosts()[0], "sidecar", 2, place)
    for phase in ("copy_in", "wait", "copy_out"):
        worker.span("worker", phase, 0, MS, round=1)
    for phase in ("wait_workers", "exchange", "return"):
        sidecar.span("sidecar", phase, 0, MS, round=1)
    sidecar.span("sidecar", "reduce", 0, MS, round=1, part_round=1, chunk=0, shard=0)
    _, path = merged(tmp_path, [worker, sidecar])
    assert check.problems(spans.read(path)) == []


@pytest.mark.parametrize("tail", ['{"ph":"X","cat":"sha', '{"ph":"X"}', "{"])
def test_tail_of_a_killed_process_is_left_out(tmp_path, writers, tail):
    path = writers[0].write(tmp_path, tail)
    trace = files.read(path)
    assert trace.truncated
    assert len(trace.events) == 2 * (1 + 2 + 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "first line"),
        ("not json", "first line"),
        ('{"traceEvents":[]}\n', "first line"),
        ("[\n", "of which process"),
        ('[\n{"ph":"X"},\n', "of which process"),
        ('[\n{"name":"thalweg_process","args":{}},\n', "another release"),
        ('[\nwhat?\n{"ph":"X"},\n', "damaged"),
    ],
)
def test_file_that_is_no_trace_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "thalweg-x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as refusal:
        files.read(path)
    assert str(path) in str(refusal.value)


def test_profile_of_torch_lies_inside_its_worker(tmp_path, writers):
    """Host b's wall clock, which the profiler reads, is 4 ms behind."""
    base = 10**18 - 5 * MS
    ts = (100 * MS + 5 * MS + writers[2].host.wall_ahead) / 1e3
    profile = {
        "baseTimeNanoseconds": base,
        "distributedInfo": {"rank": 1},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 101, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "backward", "pid": 101, "tid": 101, "ts": ts, "dur": 9000.0},
            {"ph": "i", "name": "mark", "pid": "Traces", "tid": "x", "ts": ts, "s": "g"},
        ],
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    result, merged_path = merged(tmp_path, writers, [torch_profile.read(path)])
    (copy_in,) = find(merged_path, "copy_in", rank=1, round=1)
    (backward,) = [e for e in result.events if e.get("name") == "backward"]
    assert backward["ts"] == pytest.approx(copy_in.begin, abs=0.01)
    assert backward["dur"] == 9000.0
    names = {e["pid"]: e["args"]["name"] for e in result.events if e["name"] == "process_name"}
    assert names[backward["pid"]] == "node 1 worker 1 (b 101): torch"
    assert len(names) == 5 + 2
    assert check.problems(spans.read(merged_path)) == []


def test_profile_goes_by_rank_where_hosts_have_the_same_process_number(tmp_path, writers):
    traces = [files.read(writer.write(tmp_path)) for writer in writers]
    for trace in traces:
        trace.pid = 1
    for rank, trace in ((0, traces[0]), (1, traces[2])):
        profile = torch_profile.TorchProfile(tmp_path, 0, rank, [{"pid": 1}])
        assert torch_profile.worker_of(profile, traces) is trace


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ([], "no trace of torch.profiler"),
        ({"traceEvents": []}, "baseTimeNanoseconds"),
        ({"baseTimeNanoseconds": 5, "traceEvents": []}, "found 0"),
        ({"baseTimeNanoseconds": 5}, "no 'traceEvents'"),
        ({"baseTimeNanoseconds": "x", "traceEvents": []}, "no trace of torch.profiler: invalid"),
        ({"baseTimeNanoseconds": 5, "traceEvents": [7]}, "no trace of torch.profiler: an event"),
        ({"baseTimeNanoseconds": 5, "traceEvents": 7}, "no trace of torch.profiler: 'int'"),
    ],
)
def test_profile_that_belongs_to_no_worker_is_refused(tmp_path, writers, capsys, profile, reason):
    (tmp_path / "p.json").write_text(json.dumps(profile))
    merged(tmp_path, writers)
    argv = ["trace", "merge", str(tmp_path / "traces"), "--torch", str(tmp_path / "p.json")]
    assert main([*argv, "-o", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "p.json" in error


def test_command_merges_and_checks(tmp_path, writers, capsys):
    merged(tmp_path, writers)
    output = tmp_path / "out.json"
    assert main(["trace", "merge", str(tmp_path / "traces"), "-o", str(output)]) == 0
    assert "node 1 sidecar (b 200): clock ± 200.0 us" in capsys.readouterr().out
    assert main(["trace", "check", str(output)]) == 0
    said = capsys.readouterr()
    assert "every bucket has all phases" in said.out
    (line,) = [line for line in said.out.splitlines() if line.startswith("shard fold")]
    assert line.split()[2:] == ["4", "2.000", "2.000", "2.000", "2.000"]


def test_command_says_what_is_missing(tmp_path, writers, capsys):
    _, path = merged(tmp_path, writers[:-1])
    assert main(["trace", "check", str(path)]) == 1
    assert "its shard has no fold" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "empty", "merged.json"])
def test_command_refuses_what_is_not_there(tmp_path, capsys, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "merged.json").write_text("{}")
    verb = ["check"] if what == "merged.json" else ["merge", "-o", str(tmp_path / "o")]
    assert main(["trace", *verb, str(tmp_path / what)]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"traceEvents": [{"name": "thalweg_process"}]}',
        '{"traceEvents": [7]}',
        '{"traceEvents": [{"name": "thalweg_process", "pid": 1, "args": {"clock": "c", '
        '"error_us": 0, "dropped": 0}}, {"ph": "X", "cat": "worker", "name": "wait"}]}',
    ],
)
def test_file_that_is_no_merged_trace_is_refused(tmp_path, capsys, text):
    path = tmp_path / "merged.json"
    path.write_text(text)
    assert main(["trace", "check", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"thalweg: {path} is no merged trace: make one with thalweg trace merge\n"
    )


@pytest.mark.parametrize("which", ["trace", "profile"])
def test_deeply_nested_text_is_refused(tmp_path, writers, capsys, which):
    deep = tmp_path / "thalweg-deep.json"
    deep.write_text("[" * 100_000 if which == "profile" else "[\n" + "[" * 100_000 + ",\n{},\n")
    inputs = [deep] if which == "trace" else [writers[0].write(tmp_path), "--torch", deep]
    command = ["trace", "merge", *map(str, inputs), "-o", str(tmp_path / "m.json")]
    assert main(command) == 2
    assert "thalweg-deep.json" in capsys.readouterr().err


def pulled(writers, keep=lambda line: False):
    """Turns the second round into one that asks shards for weights; `keep` leaves lines."""
    for writer in writers:
        writer.lines = [
            line
            for line in writer.lines
            if line["name"] not in ("copy_in", "reduce", "send")
            or line["args"].get("round") != 2
            or keep(line)
        ]
    what = {"part_round": 2, "chunk": 0, "shard": 0}
    writers[-1].span("shard", "update", 220 * MS, 221 * MS, **what)


def test_round_that_asks_shards_for_weights_needs_no_gradient(tmp_path, writers):
    pulled(writers)
    _, path = merged(tmp_path, writers)
    assert check.problems(spans.read(path)) == []


@pytest.mark.parametrize("phase", ["copy_in", "send"])
def test_gradient_that_only_one_gives_is_missing_of_the_others(tmp_path, writers, phase):
    pulled(writers, lambda line: line["name"] == phase and line["args"]["node"] == 0)
    _, path = merged(tmp_path, writers)
    found = check.problems(spans.read(path))
    assert any("round 2: worker 1 has no copy_in" in problem for problem in found)
    assert any("round 2, chunk 0: node 1 has no send" in problem for problem in found)
    assert not any("round 1" in problem for problem in found)


def test_round_without_gradients_is_incomplete_where_shards_update_nothing(tmp_path, writers):
    pulled(writers)
    writers[-1].lines.pop()
    _, path = merged(tmp_path, writers)
    found = check.problems(spans.read(path))
    assert any("round 2: worker 0 has no copy_in" in problem for problem in found)


def test_output_that_cannot_be_written_is_said_before_merging(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "find", lambda _: pytest.fail("it begins to read"))
    output = tmp_path / "nowhere" / "m.json"
    assert main(["trace", "merge", str(tmp_path), "-o", str(output)]) == 2
    told = capsys.readouterr().err
    assert told == f"thalweg: {output} cannot be written: No such file or directory\n"


def test_output_is_left_as_it_was_where_the_traces_are_bad(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept", encoding="ascii")
    for output in (old, new):
        assert main(["trace", "merge", str(tmp_path / "none"), "-o", str(output)]) == 2
    assert old.read_text(encoding="ascii") == "kept"
    assert not new.exists()


@pytest.mark.parametrize("which", ["a trace", "a link to a trace", "a profile"])
def test_output_that_is_an_input_is_refused_and_left_as_it_was(tmp_path, writers, capsys, which):
    trace, profile, link = writers[0].write(tmp_path), tmp_path / "torch.json", tmp_path / "link"
    profile.write_text("{}", encoding="ascii")
    link.symlink_to(trace)
    output = {"a trace": trace, "a link to a trace": link, "a profile": profile}[which]
    before = output.read_text(encoding="utf-8")
    command = ["trace", "merge", str(tmp_path), "--torch", str(profile), "-o", str(output)]
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"thalweg: {output} is one of the files to merge: give another --output\n"
    )
    assert output.read_text(encoding="utf-8") == before


def test_output_is_left_as_it_was_where_writing_fails(tmp_path, writers, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writers[0].write(tmp_path)
    output = tmp_path / "m.json"
    output.write_text("kept", encoding="ascii")
    monkeypatch.setattr(merge.json, "dumps", full)
    assert main(["trace", "merge", str(tmp_path), "-o", str(output)]) == 2
    assert output.read_text(encoding="ascii") == "kept"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


def test_output_to_a_device_is_written_to_it(tmp_path, writers):
    writers[0].write(tmp_path)
    assert main(["trace", "merge", str(tmp_path), "-o", "/dev/stdout"]) == 0
    assert main(["trace", "merge", str(tmp_path), "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_trace_that_cannot_be_read_is_named(tmp_path, writers, capsys):
    writers[0].write(tmp_path)
    (tmp_path / "thalweg-odd.json").mkdir()
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "m.json")]) == 2
    told = capsys.readouterr().err
    assert told == f"thalweg: {tmp_path}/thalweg-odd.json cannot be read: Is a directory\n"
