"""Tests `thalweg status` with shards whose answers the tests choose."""

import contextlib
import json
import socket
import ssl
import sys
import threading

import pytest
from shard_answers import http_server, job, node, shard

from thalweg.cli import _http, _status_table, main
from thalweg.cli._look import Look, look


@pytest.fixture(autouse=True)
def output_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)


def table(before, now):
    return _status_table.lines(before, now)


def row_of(lines, start):
    (found,) = [line for line in lines if line.strip().startswith(start)]
    return " ".join(found.split())


BEFORE = [Look("a:1", "", shard(), [job()])]
LATER_JOB = job(
    rounds=300,
    received={"raw_bytes": 44000.0, "wire_bytes": 6000.0},
    nodes=[
        node(0, last_rounds=70, waited_seconds=0.07, reconnections=2),
        node(1, last_rounds=230, waited_seconds=0.8),
    ],
)
LATER = shard(uptime=52.0, rounds=300, received={"raw_bytes": 0.0, "wire_bytes": 6e6})


def test_rates_are_growth_over_the_shards_own_time():
    lines = table(BEFORE, [Look("a:1", "", LATER, [LATER_JOB])])
    assert row_of(lines, "a:1") == "a:1 52 s live 1 100 2 MB/s 0 B/s 0 B 1 GB of 4 GB"
    # Node 1 was last in 190 of 200 rounds, and the others waited 0.76 s for it in these.
    assert row_of(lines, "1 ") == "1 host1 active 4 250 ms ago 95% 4 ms slowest"
    assert row_of(lines, "0 ") == "0 host0 active 4 250 ms ago 5% 1 ms reconnected 2 times"
    # 40000 more raw bytes took 4000 on the wire.
    assert any(line.startswith("job resnet ") and line.endswith(" 10x · seen on 1 of 2 shards")
               for line in lines)  # fmt: skip


def test_node_that_others_hardly_wait_for_is_not_the_slowest():
    nodes = [node(0, last_rounds=70, waited_seconds=0.07), node(1, last_rounds=230)]
    nodes[1]["waited_seconds"] = 0.04 + 190 * 0.0014
    [later] = [job(**{**LATER_JOB, "nodes": nodes})]
    lines = table(BEFORE, [Look("a:1", "", LATER, [later])])
    assert row_of(lines, "1 ") == "1 host1 active 4 250 ms ago 95% 1.4 ms"


@pytest.mark.parametrize("before", [[], [Look("a:1", "", shard(started=1.0), [])]])
def test_without_an_earlier_look_at_the_same_process_there_are_no_rates(before):
    lines = table(before, [Look("a:1", "", LATER, [LATER_JOB])])
    assert row_of(lines, "a:1") == "a:1 52 s live 1 - - - 0 B 1 GB of 4 GB"
    assert " 77% " in row_of(lines, "1 ")  # 230 of 300, since the job began


def test_parts_of_a_job_on_several_shards_are_one_job():
    waiting = {"bucket": 0, "part": 0, "chunk": 0, "round": 3, "nodes": [1], "seconds": 4.2}
    now = [Look("a:1", "", shard(), [job()]), Look("b:1", "", shard(), [job(waiting=waiting)])]
    lines = table([], now)
    (head,) = [line for line in lines if line.startswith("job ")]
    assert head == "job resnet · running · fp16 · 2 nodes · 8 workers · 16 kB as 8 kB · 2x"
    assert row_of(lines, "0 ").endswith(" 60% 1 ms")
    assert lines[-1] == "  waiting for node 1 (host1) for 4.2 s"


def test_weights_on_shards_are_shown_with_the_time_of_their_updates():
    kept = {"residual_bytes": 3_000_000, "update_seconds": 0.5}
    now = [Look("a:1", "", LATER, [LATER_JOB | kept]), Look("b:1", "", LATER, [LATER_JOB | kept])]
    then = [Look(each.address, "", shard(), [job(update_seconds=0.3)]) for each in now]
    lines = table(then, now)
    assert row_of(lines, "weights ") == (
        "weights on the shards: 6 MB with the optimizer's state, 400 ms of updates"
    )
    assert "weights on" not in "".join(table([], BEFORE))


def test_failure_is_shown_with_its_reason_once():
    fault = {"seconds_ago": 90.0, "job": "resnet", "kind": "failed", "reason": "UNAVAILABLE",
             "message": "node 1 (host1) is gone", "rounds_lost": 3}  # fmt: skip
    failed = job(state="failed", failure="node 1 (host1) is gone")
    looks = [Look(f"{name}:1", "", shard(faults=[fault]), [failed]) for name in "ab"]
    lines = table([], looks)
    assert "  node 1 (host1) is gone" in lines
    assert lines[-1].split(maxsplit=5)[:5] == ["2", "min", "ago", "resnet", "UNAVAILABLE"]
    assert not lines[-2].strip().startswith("2 min")


def test_jobs_of_one_name_with_different_keys_are_told_apart():
    jobs = [job(), job(identity="1a2b3c4d5e6f" + 52 * "0", state="gathering")]
    lines = table([], [Look("a:1", "", shard(), jobs), Look("b:1", "", shard(), jobs)])
    heads = [line for line in lines if line.startswith("job ")]
    assert [head.split(" · ")[:2] for head in heads] == [
        ["job resnet (no key)", "running"],
        ["job resnet (1a2b3c4d)", "gathering"],
    ]


def evil(value):
    """Returns an answer with a command to the terminal in every text but those that are checked."""
    if isinstance(value, str):
        return f"evil\x1b[2J{value}\n"
    if isinstance(value, list):
        return [evil(each) for each in value]
    if isinstance(value, dict):
        is_job = "codec" in value
        return {k: v if is_job and k == "state" else evil(v) for k, v in value.items()}
    return value


def test_no_text_of_an_answer_can_command_the_terminal():
    waiting = {"bucket": 0, "part": 0, "chunk": 0, "round": 3, "nodes": [1], "seconds": 4.2}
    jobs = [job(identity="1a"), job(state="failed", failure="gone"), job(name="b", waiting=waiting)]
    fault = {"seconds_ago": 90.0, "job": "resnet", "kind": "failed", "reason": "UNAVAILABLE",
             "message": "gone", "rounds_lost": 3}  # fmt: skip
    looks = [Look("a:1", "", evil(shard(faults=[fault])), evil(jobs))]
    lines = table([], [*looks, Look("b:1", evil("not reachable"), {}, [])])
    text = "\n".join(lines)
    texts = ("not reachable", "resnet", "fp16", "host1", "active", "gone", "UNAVAILABLE")
    assert [each for each in texts if f"evil?[2J{each}?" not in text] == []
    assert all(line.isprintable() for line in lines)


def test_lines_fit_the_terminal_and_are_whole_in_a_pipe(monkeypatch):
    looks = [Look("a:1", "", shard(), [job(codec="x" * 300)])]
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, _status_table.lines([], looks))) > 300
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert max(map(len, _status_table.lines([], looks))) == 60


@pytest.fixture
def answers():
    """Returns a server's answers, by path; "address" is the server's own."""
    bodies = {}
    with http_server(bodies) as address:
        bodies["address"] = address
        yield bodies


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/api/v1/shard", None, "is answered with 404; expected the HTTP address of an aggregator"),
        ("/api/v1/shard", "hello", "is no shard of Thalweg"),
        ("/api/v1/shard", "[]", "/api/v1/shard is [], expected an object"),
        ("/api/v1/shard", "[" * 200_000, "is no shard of Thalweg: the answer is nested too deeply"),
        ("/api/v1/jobs", '{"jobs": 3}', "jobs is 3, expected a list"),
        ("/api/v1/jobs", "{}", "answers as no shard of this release does: jobs is None"),
        ("/api/v1/jobs", '{"jobs": [{"name": 3}]}', "jobs[0].name is 3, expected text"),
    ],
)
def test_what_is_no_shard_is_said_so(path, body, error, answers):
    answers |= {"/api/v1/shard": json.dumps(shard()), "/api/v1/jobs": '{"jobs": []}'} | {path: body}
    assert error in look(answers["address"]).error


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"state": "pausing"}, "state is 'pausing', expected one of gathering, running, failed"),
        ({"rounds": float("nan")}, "rounds is nan, expected a number"),
        ({"nodes": [{}]}, "nodes[0].name is None, expected text"),
        ({"waiting": {"seconds": 1, "nodes": [2]}}, "waiting.nodes is [2], of nodes it lacks"),
        ({"placement": {"text": True}}, "placement.text is True, expected text"),
    ],
)
def test_job_of_another_release_hides_no_other_shard(change, error, answers, capsys):
    answers["/api/v1/shard"] = json.dumps(shard())
    answers["/api/v1/jobs"] = json.dumps({"jobs": [job()]})
    with http_server(answers | {"/api/v1/jobs": json.dumps({"jobs": [job(**change)]})}) as odd:
        assert main(["status", "--shards", f"{odd},{answers['address']}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith(f"{odd}  ")]
    assert f"answers as no shard of this release does: jobs[0].{error}" in told
    assert any(line.startswith("job resnet · running") for line in lines)


@pytest.mark.parametrize(
    ("head", "access"),
    [
        (b"", _http.PLAIN),
        (b"HTTP/1.0 200 OK\r\n\r\n", _http.PLAIN),
        # A record of a handshake, of which 16000 bytes are to follow.
        (b"\x16\x03\x03\x3e\x80", _http.Access(http=ssl.create_default_context())),
    ],
    ids=["head", "body", "handshake"],
)
def test_answer_that_does_not_end_is_not_waited_for(head, access, monkeypatch):
    monkeypatch.setattr(_http, "_ANSWER_SECONDS", 0.5)
    stopped = threading.Event()

    def drip(server):
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(head)
            while not stopped.wait(0.02):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        found = look(f"127.0.0.1:{server.getsockname()[1]}", access)
        stopped.set()
        thread.join()
    assert found.error == "not reachable: timed out"


def test_connection_that_comes_when_the_time_is_over_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(_http, "_ANSWER_SECONDS", 0.5)

    class Early(threading.Timer):
        """Is over before there is a connection that it could end."""

        def start(self):
            self.function()

    monkeypatch.setattr(threading, "Timer", Early)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = look(f"127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b""
    assert found.error == "not reachable: timed out"


def test_answer_that_is_too_long_is_not_read(answers, monkeypatch):
    monkeypatch.setattr(_http, "_MOST_BYTES", 1 << 20)
    answers["/api/v1/shard"] = " " * (2 << 20)
    assert look(answers["address"]).error.endswith("the answer has more than 1 MiB")


def test_json_is_one_line_for_each_look(answers, capsys):
    answers["/api/v1/shard"] = json.dumps(shard())
    answers["/api/v1/jobs"] = json.dumps({"jobs": [job()]})
    assert main(["status", "--json", "--shards", answers["address"]]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    expected = {"address": answers["address"], "error": "", "shard": shard(), "jobs": [job()]}
    assert json.loads(line) == {"shards": [expected]}


def test_watching_goes_on_until_it_is_interrupted(answers, capsys, monkeypatch):
    answers["/api/v1/shard"] = json.dumps(shard())
    answers["/api/v1/jobs"] = json.dumps({"jobs": [job()]})
    left = [0, 0, 0]

    def sleep(_):
        if not left:
            raise KeyboardInterrupt
        left.pop()

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["status", "--watch", "--shards", answers["address"]]) == 130
    assert capsys.readouterr().out.count("job resnet") == 3  # the first sample has no rates


def test_shard_that_is_not_there_is_an_exit_code_and_a_line(capsys):
    assert main(["status", "--shards", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1  not reachable: Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["nowhere", "", "http://localhost:7071", "::1:7071"])
def test_wrong_addresses_are_refused(value, capsys):
    assert main(["status", "--shards", value]) == 2
    assert "--shards" in capsys.readouterr().err
