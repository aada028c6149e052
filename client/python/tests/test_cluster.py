"""Tests `thalweg doctor --cluster` with shards and a kubectl whose answers the tests choose."""

import contextlib
import json
import os
import socket
import threading
import time

import pytest
from shard_answers import http_server, job, node, shard

from thalweg import __version__
from thalweg.cli import main
from thalweg.cli._cluster import _greet

NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def kubectl(tmp_path, monkeypatch):
    """Returns a folder that is PATH; its `kubectl` answers with files beside it, by arguments."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("THALWEG_AGGREGATORS", raising=False)
    return tmp_path


def doctor(capsys, *shards, arguments=()):
    """Returns exit code and lines, with shards that answer with these (shard, jobs)."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for what, jobs in shards:
            now = {"unix_seconds": time.time()} | what
            bodies = {"/api/v1/shard": json.dumps(now), "/api/v1/jobs": json.dumps({"jobs": jobs})}
            addresses.append(stack.enter_context(http_server(bodies)))
        code = main(["doctor", "--cluster", "--shards", ",".join(addresses), *arguments])
    return code, capsys.readouterr().out.splitlines()


def lines_of(level, lines):
    return [line.removeprefix(f"{level:<4}  ") for line in lines if line.startswith(level)]


def test_healthy_cluster_is_all_ok(capsys):
    code, lines = doctor(capsys, (shard(), [job()]), (shard(), [job()]))
    assert code == 0
    assert "ok    job resnet: running, 2 nodes, 8 workers" in lines
    assert lines_of("note", lines) == ["Kubernetes: not looked at, there is no kubectl"]
    assert lines[-1] == "3 ok, 0 warn, 0 FAIL"


def test_different_wire_versions_fail_and_name_the_shards(capsys):
    code, lines = doctor(capsys, (shard(), []), (shard(wire_version=2), []))
    (failure,) = lines_of("FAIL", lines)
    assert code == 1
    assert failure.startswith("shards speak different wire versions: 1 (127.0.0.1:")
    assert "; 2 (127.0.0.1:" in failure


def test_different_versions_warn(capsys):
    code, lines = doctor(capsys, (shard(), []), (shard(version="0.0.9"), []))
    assert code == 0
    (warning,) = lines_of("warn", lines)
    assert warning.startswith("shards are of different versions: ")
    assert "0.0.9 (127.0.0.1:" in warning


def test_shards_of_another_version_than_this_machine_warn(capsys):
    code, lines = doctor(capsys, (shard(version="0.0.9"), []))
    (warning,) = lines_of("warn", lines)
    assert (code, warning.split(" (")[0]) == (
        0,
        f"this machine has thalweg {__version__}, the shards 0.0.9",
    )


def test_clock_that_is_off_warns_by_how_much_at_least(capsys):
    code, lines = doctor(capsys, (shard(unix_seconds=time.time() - 7200), []))
    (warning,) = lines_of("warn", lines)
    assert code == 0
    assert warning.endswith("its clock is 2 h 0 min from this machine's")


def test_shard_that_shuts_down_warns(capsys):
    assert "is shutting down" in lines_of("warn", doctor(capsys, (shard(draining=True), []))[1])[0]


def test_members_that_miss_are_named(capsys):
    nodes = [node(0), node(1, state="missing", name=""), node(2, silent_seconds=8.0)]
    part = job(state="gathering", shards=1, nodes=nodes)
    code, lines = doctor(capsys, (shard(), [part]))
    assert code == 0
    assert lines_of("warn", lines) == [
        "job resnet: node 1 has not come",
        "job resnet: node 2 (host2) has sent nothing for 8 s",
    ]


def test_job_that_misses_a_shard_warns(capsys):
    _, lines = doctor(capsys, (shard(), [job()]), (shard(), []))
    assert lines_of("warn", lines) == ["job resnet: it is on 1 of its 2 shards"]


def placed(seconds, ring):
    told = {"shares": [1.0], "seconds_per_byte": seconds, "ring_seconds_per_byte": ring}
    return [job(placement=told | {"text": "what it costs"}), job(placement=None)]


@pytest.mark.parametrize(
    ("level", "seconds", "ring"),
    [("warn", 2.5e-8, 1.6e-8), ("ok", 1.5000001e-8, 1.5e-8), ("ok", 0.0, 0.0), ("ok", 1e-8, 0.0)],
)
def test_what_a_placement_costs_is_told_and_warned_of_if_a_ring_costs_less(
    level, seconds, ring, capsys
):
    first, second = placed(seconds, ring)
    _, lines = doctor(capsys, (shard(), [second]), (shard(), [first]))
    assert "job resnet: what it costs" in lines_of(level, lines)


def test_placement_that_weights_replace_is_not_told(capsys):
    first, second = placed(2.5e-8, 1.6e-8)
    _, lines = doctor(capsys, (shard(weight=0), [first]), (shard(weight=2), [second]))
    assert lines_of("warn", lines) == []
    assert "what it costs" not in "".join(lines)


def test_failed_job_and_recent_faults_are_told_once(capsys):
    fault = {"seconds_ago": 90.0, "job": "resnet", "kind": "failed", "reason": "UNAVAILABLE",
             "message": "host1 is gone", "rounds_lost": 3}  # fmt: skip
    old = fault | {"seconds_ago": 9000.0, "job": "bert"}
    failed = job(state="failed", failure="host1 is gone")
    part = (shard(faults=[fault, old]), [failed])
    code, lines = doctor(capsys, part, part)
    assert code == 1
    assert lines_of("FAIL", lines) == ["job resnet: has failed: host1 is gone"]
    told = "2 min ago, job resnet: failed, UNAVAILABLE: host1 is gone"
    assert lines_of("warn", lines) == [told]


def test_shard_that_is_not_there_fails_by_both_ports(capsys):
    assert main(["doctor", "--cluster", "--aggregators", NOBODY, "--shards", NOBODY]) == 1
    failures = lines_of("FAIL", capsys.readouterr().out.splitlines())
    assert failures[0].startswith(f"gRPC {NOBODY}: cannot be reached")
    assert failures[1] == f"HTTP {NOBODY}: not reachable: Connection refused"


def test_http_ports_are_the_charts_unless_they_are_given(capsys):
    assert main(["doctor", "--cluster", "--aggregators", NOBODY]) == 1
    assert "HTTP 127.0.0.1:7071: " in capsys.readouterr().out


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_is_not_grpc_is_said_so(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        finding = _greet(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert finding.level == "FAIL"
    assert "something else than gRPC answers" in finding.text


@pytest.mark.parametrize(
    "arguments", [["--cluster"], ["--cluster", "--shards", ","], ["--shards", NOBODY]]
)
def test_wrong_arguments_of_the_doctor_exit_with_2(arguments, capsys):
    assert main(["doctor", *arguments]) == 2
    assert "--shards" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--nodes", "2"], ["--nproc", "2"], ["--codec", "fp16"], ["--rate", "50mbit"]]
)
def test_options_of_a_script_without_one_are_refused_with_the_command_to_give(arguments, capsys):
    assert main(["doctor", *arguments]) == 2
    assert "are for a script: thalweg doctor train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--aggregators", "a:1"],
        ["--sidecar", "/s"],
        ["--cluster"],
        ["--shards", "a:1"],
        ["--namespace", "ml"],
        ["--tls-ca", "ca.crt"],
        ["--http-token-file", "token"],
    ],
)
def test_options_of_servers_are_not_for_a_script(options, tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise AssertionError", encoding="ascii")
    assert main(["doctor", *options, str(tmp_path / "train.py")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert options[0] in shown.err and "are not for a script" in shown.err


def fake_kubectl(folder, answers):
    """Writes a kubectl with `answers` by its first arguments: output or (standard error,)."""
    script = ["#!/bin/sh", 'case "$*" in']
    for number, (words, answer) in enumerate(answers.items()):
        failed = isinstance(answer, tuple)
        text = answer[0] if failed else json.dumps(answer)
        (folder / str(number)).write_text(text, encoding="utf-8")
        redirect = " >&2; exit 1" if failed else ""
        script.append(f'"--request-timeout=5s {words}"*) while read -r line || [ -n "$line" ]; do '
                      f'echo "$line"; done <{folder}/{number}{redirect};;')  # fmt: skip
    script += ['*) echo no answer to "$*" >&2; exit 1;;', "esac", ""]
    (folder / "kubectl").write_text("\n".join(script), encoding="utf-8")
    (folder / "kubectl").chmod(0o755)


def pod(name, phase="Running", ready="True", **container):
    state = container.pop("state", {"running": {}})
    containers = [{"name": "aggregator", "state": state, "restartCount": 0} | container]
    conditions = [{"type": "Ready", "status": ready}]
    status = {"phase": phase, "conditions": conditions, "containerStatuses": containers}
    owners = [{"name": "thalweg-aggregator"}]
    return {"metadata": {"name": name, "ownerReferences": owners}, "status": status}


def event(name, message):
    return {
        "metadata": {"creationTimestamp": "2026-11-22T00:00:00Z"},
        "involvedObject": {"kind": "Pod", "name": name},
        "reason": "FailedScheduling",
        "message": message,
    }


CLUSTER = {
    "version": {"serverVersion": {"gitVersion": "v1.31.0"}},
    "get pods --selector app.kubernetes.io/part-of=thalweg": {"items": [pod("a-0")]},
    "get pods --selector thalweg.io/sidecar": {
        "items": [pod("ddp-master-0", "Succeeded", "False")]
    },
    "get events": {"items": []},
    "get customresourcedefinition pytorchjobs": {},
    "get customresourcedefinition clustertrainingruntimes": ("not found",),
    "explain pytorchjobs": {},
}


def test_cluster_that_is_well_is_ok(capsys, kubectl):
    fake_kubectl(kubectl, CLUSTER)
    code, lines = doctor(capsys, (shard(), []))
    assert code == 0
    assert lines[-3:-1] == [
        "ok    Kubernetes: v1.31.0, pods of Thalweg: 2",
        "ok    pytorchjobs.kubeflow.org: keeps native sidecars",
    ]
    assert lines[-1] == "3 ok, 0 warn, 0 FAIL"


def test_pods_that_ail_and_their_events_are_told(capsys, kubectl):
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    pods = [pod("a-0", "Pending", "False", state=waiting), pod("a-1", restartCount=2)]
    events = [event("a-0", "no machine is free"), event("stranger", "not ours")]
    answers = {"get pods --selector app.kubernetes.io/part-of=thalweg": {"items": pods},
               "get events": {"items": events}}  # fmt: skip
    fake_kubectl(kubectl, CLUSTER | answers)
    code, lines = doctor(capsys, (shard(), []))
    assert code == 1
    assert lines_of("FAIL", lines) == ["pod a-0: Pending: aggregator: ImagePullBackOff"]
    assert lines_of("warn", lines) == [
        "pod a-1: aggregator has been started 3 times",
        "event of Pod a-0: FailedScheduling: no machine is free",
    ]


def test_pod_with_both_labels_is_counted_and_told_once(capsys, kubectl):
    both = {"items": [pod("sidecar-x", restartCount=2)]}
    answers = {
        "get pods --selector app.kubernetes.io/part-of=thalweg": both,
        "get pods --selector thalweg.io/sidecar": both,
    }
    fake_kubectl(kubectl, CLUSTER | answers)
    _, lines = doctor(capsys, (shard(), []))
    assert "ok    Kubernetes: v1.31.0, pods of Thalweg: 1" in lines
    assert lines_of("warn", lines) == ["pod sidecar-x: aggregator has been started 3 times"]


def test_definition_that_drops_the_sidecar_fails(capsys, kubectl):
    answer = ('error: field "restartPolicy" does not exist',)
    fake_kubectl(kubectl, CLUSTER | {"explain pytorchjobs": answer})
    code, lines = doctor(capsys, (shard(), []))
    (failure,) = lines_of("FAIL", lines)
    assert code == 1
    assert failure.startswith("pytorchjobs.kubeflow.org: drops restartPolicy of init containers")


def test_namespace_is_asked_for(capsys, kubectl):
    key = "get pods --selector app.kubernetes.io/part-of=thalweg"
    answers = {f"{key} --namespace ml": {"items": [pod("of-ml-0", restartCount=1)]}}
    fake_kubectl(kubectl, answers | CLUSTER)
    _, lines = doctor(capsys, (shard(), []), arguments=["--namespace", "ml"])
    assert lines_of("warn", lines) == ["pod of-ml-0: aggregator has been started 2 times"]


def test_kubectl_without_a_cluster_is_a_note(capsys, kubectl):
    fake_kubectl(kubectl, {"version": ("The connection to the server was refused",)})
    code, lines = doctor(capsys, (shard(), []))
    assert code == 0
    assert lines_of("note", lines) == [
        "Kubernetes: not looked at: The connection to the server was refused"
    ]


def test_environment_names_the_shards(monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "THALWEG_AGGREGATORS", NOBODY)
    assert main(["doctor", "--cluster"]) == 1
    assert f"gRPC {NOBODY}: cannot be reached" in capsys.readouterr().out
