"""Tests how much memory weights on shards take, by what the servers say of themselves."""

from pathlib import Path

import pytest
from harness import Job, servers

JOBS = Path(__file__).parent / "kept_memory_jobs.py"
ELEMENTS = 2_000_000


@pytest.mark.alone  # links are measured; shards have equal parts if their rates are alike
@pytest.mark.parametrize("nodes", [2, 4])
def test_each_node_keeps_its_part_of_weights_and_moments_and_all_last_results(nodes, tmp_path):
    with servers() as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0") for _ in range(nodes)]
        job = Job(
            "kept",
            cluster,
            tmp_path,
            sidecar_of=[each.address for each in sidecars],
            env={"SIDECARS_HTTP": ",".join(each.http for each in sidecars)},
            jobs=JOBS,
        )
        found = job.results()[0]
    # Three floats for each weight on one of the shards; chunks are what their parts differ by.
    assert sum(kept for kept, _ in found) == 12 * ELEMENTS
    for kept, last in found:
        assert kept <= 1.05 * 12 * ELEMENTS / nodes
        # In bf16, for other nodes if a shard forgets the job, because it or a node is restarted.
        assert last == pytest.approx(2 * ELEMENTS, rel=0.05)
