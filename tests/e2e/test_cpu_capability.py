"""Nodes with different CPUs: replicas have the same bits all the same."""

from __future__ import annotations

from pathlib import Path

from harness import Job, servers

SCRIPT = Path(__file__).parent / "capability_jobs.py"


def test_replicas_on_old_and_new_cpus_are_bit_identical_for_every_codec(tmp_path, monkeypatch):
    for name in ("THALWEG_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)  # the third node's CPU must not be limited
    # The first node has what every CPU has, the second AVX2, the third whatever this CPU has. torch
    # is limited alike, so that the gradients differ, too.
    limits = [
        {"THALWEG_CPU_CAPABILITY": name, "ATEN_CPU_CAPABILITY": name} if name else {}
        for name in ("default", "avx2", "")
    ]
    with servers(shards=2) as cluster:
        for limit in limits:
            cluster.add_sidecar(env=limit)
        sockets = [server.address for server in cluster.sidecars]
        job = Job("replicas", cluster, tmp_path, sidecar_of=sockets, env_of=limits, jobs=SCRIPT)
        first, *others = job.results()
    limited = first.pop("cpu")
    for other in others:
        assert other.pop("cpu") != limited
        assert other == first
