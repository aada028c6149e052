"""Tests jobs of several nodes without aggregators: their sidecars host the shards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE, Job, environment, servers
from leftovers import processes_below

RUN = [sys.executable, "-m", "thalweg", "run"]
ALL_HOST = {"THALWEG_LOCAL_SHARDS": "1"}


def run(folder: Path, tmp_path: Path, arguments: list[str], script: str, **variables: str):
    """Runs a script with `thalweg run`; returns its output, and what its workers print as JSON."""
    path = tmp_path / "train.py"
    path.write_text(script)
    env = environment(folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | variables
    done = subprocess.run(
        [*RUN, *arguments, str(path)], env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    told = [line.partition("] ")[2] for line in done.stdout.splitlines() if ".worker" in line]
    return output, [json.loads(line) for line in told if line.startswith("{")]


# Each gradient is compared with the mean, in float64, of what all ranks compute alone. With u
# float32's rounding and W ranks, torch rounds 1/W, its product with each gradient, and at most
# W - 1 additions; Thalweg rounds W - 1 additions and one product with a rounded reciprocal. The
# factor 2 covers the products of roundings.
GRADIENTS = """
import gc, hashlib, json
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thalweg.ddp

def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))

def step(model, x):
    model.zero_grad()
    model(x).square().mean().mul(1000).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
own = step(build(), x)
gathered = [torch.empty_like(own) for _ in range(world)]
dist.all_gather(gathered, own)
every = torch.stack(gathered).double()
bound = 2 * (world + 2) * 2.0**-24 * every.abs().mean(0)
result = {"differs": ((own.double() - every.mean(0)).abs() > bound).double().mean().item()}
for name in ("plain", "attached"):
    model = DistributedDataParallel(build(), bucket_cap_mb=0.01)
    state = thalweg.ddp.attach(model, chunk_bytes=4096) if name == "attached" else None
    for _ in range(3):
        averaged = step(model, x)
    result[name] = ((averaged.double() - every.mean(0)).abs() <= bound).all().item()
result["bits"] = hashlib.sha256(averaged.numpy().tobytes()).hexdigest()
result["sent"] = state.stats()["wire_bytes_sent"]
result["link"] = state.stats()["link_bytes_sent"]
state.close()
print(json.dumps(result), flush=True)
del model, state
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("shards", [["--shards", "0"], ["--shards", "1"]], ids=["none", "one"])
def test_gradients_of_three_nodes_that_host_the_shards_are_those_of_plain_ddp(shards, tmp_path):
    with servers() as nothing:
        arguments = ["--nodes", "3", "--local-shards", "1", *shards]
        output, results = run(nothing.folder, tmp_path, arguments, GRADIENTS)
    assert len(results) == 3
    for result in results:
        assert result["plain"]
        assert result["attached"]
        assert result["differs"] > 0.5
        assert result["sent"] > 0
    # Two nodes send their gradients to a shard, which sends the sums to them; an aggregator's links
    # are no node's.
    sent, link = results[0]["sent"], sum(result["link"] for result in results)
    assert link == 4 * sent if shards == ["--shards", "0"] else 3 * sent < link < 4 * sent
    assert len({result["bits"] for result in results}) == 1
    assert ("aggregator0 serves" in output) == (shards == ["--shards", "1"])


SUMMARY = """
import gc
import json
import os
import torch, torch.distributed as dist
import thalweg.ddp

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 2))
state = thalweg.ddp.attach(model)
print(json.dumps({"summary": state.summary()}), flush=True)
state.close()
del model, state
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("nodes", "local_shards"), [("3", "1"), ("2", "0")])
def test_all_workers_know_what_the_first_sidecar_logs_and_few_aggregators_alone_are_warned_of(
    nodes, local_shards, tmp_path
):
    with servers() as nothing:
        arguments = ["--nodes", nodes, "--shards", "1", "--local-shards", local_shards]
        output, results = run(nothing.folder, tmp_path, arguments, SUMMARY)
    (logged,) = re.findall(r"\[node0\.sidecar\].* job '[^']*': (.*; 100 MB take .*)", output)
    # A starved machine may measure links of which one carries both as long.
    forecast = (
        r".+; 100 MB take [\d.e-]+ s, ([\d.]+ times )?as long as in a ring; .+ link carries .+"
    )
    assert re.fullmatch(forecast, logged)
    assert len(results) == int(nodes)
    for result in results:
        assert f"\nplacement: {logged}\ncodec: fp32" in result["summary"]
    warnings = output.count("THALWEG_LOCAL_SHARDS (local_shards) is 0, and 1 aggregator serves 2")
    assert warnings == (local_shards == "0")


@pytest.mark.parametrize("variable", ["THALWEG_LOCAL_SHARDS", "THALWEG_MIN_NODES"])
def test_nodes_that_have_no_shard_to_meet_at_are_told_so_and_do_not_wait(variable, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SUMMARY)
    # The test's limit is shorter than the timeout.
    variables = {"THALWEG_TIMEOUT": "600", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    variables[variable] = "0" if variable == "THALWEG_LOCAL_SHARDS" else "1"
    with servers() as nothing:
        env = environment(nothing.folder) | variables
        done = subprocess.run(
            [*RUN, "--nodes", "2", str(path)],
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    assert done.returncode == 1
    for node in (0, 1):
        assert f"2 nodes, but the sidecar of node {node} knows no aggregator" in done.stderr
    assert variable in done.stderr


SECRETIVE = """
import gc, json, logging, secrets
import torch, torch.distributed as dist
draw, drawn = secrets.token_hex, []

def note(size=None):
    drawn.append(draw(size))
    return drawn[-1]

secrets.token_hex = note
logging.basicConfig(level=logging.DEBUG)
import thalweg.ddp

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 2))
state = thalweg.ddp.attach(model)
model(torch.ones(4, 30)).sum().backward()
logging.debug("%r %s %s", state, state.summary(), state.status())
state.close()
try:
    model(torch.ones(4, 30)).sum().backward()
except RuntimeError as error:
    logging.debug("%s", error)
with open(f"{__file__}.{dist.get_rank()}", "w") as file:
    json.dump([value for value in drawn if len(value) == 64], file)
del model, state
gc.collect()
dist.destroy_process_group()
"""


def test_secret_of_a_job_is_in_no_log_and_no_trace(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    with servers() as nothing:
        arguments = ["--nodes", "2", "--shards", "0", "--local-shards", "1"]
        settings = {"THALWEG_LOG": "trace", "THALWEG_TRACE": str(traces)}
        output, _ = run(nothing.folder, tmp_path, arguments, SECRETIVE, **settings)
    drawn = [json.loads((tmp_path / f"train.py.{rank}").read_text()) for rank in range(2)]
    assert drawn[0]
    assert "<thalweg.ddp.State job='job-" in output  # of the workers
    assert "[node1.sidecar] " in output
    files = [path for path in traces.rglob("*") if path.is_file()]
    assert files
    for secret in (value for values in drawn for value in values):
        assert secret not in output
        assert bytes.fromhex(secret) not in output.encode()
        for path in files:
            content = path.read_bytes()
            assert secret.encode() not in content
            assert bytes.fromhex(secret) not in content


def test_sidecar_that_attach_starts_and_one_that_is_there_host_the_shards_of_a_job(tmp_path):
    with servers() as nothing:
        there = nothing.add_sidecar("--shard-listen", "127.0.0.1:0", aggregators="")
        sidecars = ["", there.address]
        job = Job("two_models", nothing, tmp_path, sidecar_of=sidecars, env=ALL_HOST)
        results = job.results()
    assert results[0]["digests"] == results[1]["digests"]
    assert results[1]["sidecars"] == [there.address] * 2
    assert results[0]["sidecars"][0] == results[0]["sidecars"][1]
    for result in results:
        assert result["status"] == [None, None]


def test_process_ends_after_the_other_nodes_have_left_the_shard_that_it_has_started(tmp_path):
    os.mkfifo(tmp_path / "leave")
    with servers() as nothing:
        there = nothing.add_sidecar("--shard-listen", "127.0.0.1:0", aggregators="")
        own = nothing.folder / "own"  # of rank 0, which starts its sidecar
        own.mkdir()
        job = Job(
            "one_stays",
            nothing,
            tmp_path,
            sidecar_of=["", there.address],
            # Rank 0 waits so long at most for rank 1, which ends late on a busy machine.
            env=ALL_HOST | {"LEAVE": str(tmp_path / "leave"), "THALWEG_TIMEOUT": "60"},
            env_of=[{"TMPDIR": str(own)}, {}],
        )
        leave = (tmp_path / "leave").open("wb")  # rank 1 has come to the end of its only step
        with leave, pytest.raises(subprocess.TimeoutExpired):
            job.workers[0].process.wait(2)
        job.workers[0].process.wait(DEADLINE)
        # A container would end here, and kill the sidecar.
        assert processes_below(own) == {}
        assert job.results() == [None, None]
        own.rmdir()


def test_node_that_cannot_host_a_shard_is_named_on_all_workers(tmp_path):
    with servers() as nothing:
        idle = nothing.add_sidecar(aggregators="")
        sidecars = ["", idle.address]
        workers = Job("refused", nothing, tmp_path, sidecar_of=sidecars, env=ALL_HOST).wait()
        errors = [worker.result["sidecar"] for worker in workers]
    for error in errors:
        assert error.startswith(
            "ConfigError: thalweg: local_shards is 1, but the sidecar of node 1"
        )
        assert "--shard-listen" in error


def test_nodes_that_may_host_no_shards_are_refused_at_once(tmp_path):
    off = {"THALWEG_LOCAL_SHARDS": "0"}
    with servers() as nothing:
        lonely = nothing.add_sidecar(aggregators="")
        sidecars = ["", lonely.address]
        workers = Job("refused", nothing, tmp_path, sidecar_of=sidecars, env=off).wait()
        errors = [worker.result["sidecar"] for worker in workers]
    for error in errors:
        assert error.startswith("ConfigError: thalweg: the workers form 2 nodes")
        assert "THALWEG_LOCAL_SHARDS is 0" in error
        assert "THALWEG_AGGREGATORS" in error
