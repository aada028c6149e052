"""Tests how much memory weights on shards take, by what the servers say of themselves."""

from pathlib import Path

import pytest
from harness import Job, servers

JOBS = Path(__file__).parent / "kept_memory_jobs.py"
ELEMENTS = 2_000_000
CHUNK = 4096  # elements


@pytest.mark.parametrize("nodes", [2, 4])
def test_each_node_keeps_its_part_of_weights_and_moments_and_all_last_results(nodes, tmp_path):
    with servers() as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in range(nodes)]
        job = Job(
            "kept",
            cluster,
            tmp_path,
            sidecar_of=[each.address for each in sidecars],
            env={
                "SIDECARS_HTTP": ",".join(each.http for each in sidecars),
                "THALWEG_CHUNK_BYTES": str(4 * CHUNK),
            },
            jobs=JOBS,
        )
        found = job.results()[0]
    # Three floats for each weight on one of the shards, which divide them as their links allow: one
    # may have a chunk more than its share, and so one of them a chunk less for each of the others.
    assert sum(kept for _, kept, _ in found) == 12 * ELEMENTS
    for share, kept, last in found:
        assert kept == pytest.approx(share * 12 * ELEMENTS, abs=12 * CHUNK * nodes)
        # In bf16, for other nodes if a shard forgets the job, because it or a node is restarted.
        assert last == pytest.approx(2 * ELEMENTS, rel=0.05)
