"""Lists what the dashboard of the shards shows."""

from __future__ import annotations

from panels import Panel, Row, bounded, panel, signed

TITLE = "Aggregators"
DESCRIPTION = (
    "The shards, in aggregators and in sidecars: what they carry, what they hold, and how evenly."
)
VARIABLES = ("aggregators", "shard")
PANELS: tuple[Panel | Row, ...] = (
    panel(
        "stat",
        "Shards",
        "That are scraped and answer.",
        "none",
        "count(thalweg_shard_jobs{SHARD})",
    ),
    panel(
        "stat",
        "Jobs",
        "With members on a shard.",
        "none",
        "max(thalweg_shard_jobs{SHARD})",
    ),
    panel(
        "stat",
        "Nodes",
        "Members of all jobs on a shard.",
        "none",
        "max(thalweg_shard_nodes{SHARD})",
    ),
    panel(
        "stat",
        "Chunks",
        "Chunk rounds completed per second, on all shards.",
        "ops",
        'sum(rate(thalweg_shard_rounds_total{SHARD,outcome="ok"}[R]))',
    ),
    panel(
        "stat",
        "Held",
        "Largest share of what the jobs' windows let a shard hold.",
        "percentunit",
        "max(thalweg_shard_held_bytes{SHARD} / (thalweg_shard_held_limit_bytes{SHARD} > 0)) or "
        "vector(0)",
        change=bounded,
    ),
    panel(
        "stat",
        "Youngest shard",
        "Time since it was started.",
        "s",
        "time() - max(process_start_time_seconds{SHARD})",
    ),
    Row("Traffic"),
    panel(
        "lines",
        "Received",
        "Payload of contributions, by shard.",
        "Bps",
        ("{{instance}}", "sum by (instance) (rate(thalweg_shard_received_bytes_total{SHARD}[R]))"),
    ),
    panel(
        "lines",
        "Sent",
        "Payload of results, by shard.",
        "Bps",
        ("{{instance}}", "sum by (instance) (rate(thalweg_shard_sent_bytes_total{SHARD}[R]))"),
    ),
    panel(
        "lines",
        "Contributions",
        "By shard.",
        "ops",
        ("{{instance}}", "sum by (instance) (rate(thalweg_shard_contributions_total{SHARD}[R]))"),
    ),
    panel(
        "lines",
        "Imbalance",
        "The busiest shard's bytes over the average shard's, of those that get any: 1 is even. "
        "Weights and links of different rates make it uneven on purpose.",
        "suffix:x",
        (
            "busiest",
            "max(sum by (instance) (rate(thalweg_shard_received_bytes_total{SHARD}[R]))) / "
            "avg(sum by (instance) (rate(thalweg_shard_received_bytes_total{SHARD}[R])) > 0)",
        ),
    ),
    Row("Time"),
    panel(
        "lines",
        "Waiting for the slowest node",
        "A chunk, from its first contribution to its last; p99 by shard. Alike on all shards: a "
        "node is slow. On one shard: its link is.",
        "s",
        (
            "{{instance}}",
            "histogram_quantile(0.99, sum by (instance, le) "
            '(rate(thalweg_shard_phase_seconds_bucket{SHARD,phase="wait_for_slowest"}[R])))',
        ),
    ),
    panel(
        "lines",
        "Summing",
        "A chunk, with the encoding of its mean; p99 by shard.",
        "s",
        (
            "{{instance}}",
            "histogram_quantile(0.99, sum by (instance, le) "
            '(rate(thalweg_shard_phase_seconds_bucket{SHARD,phase="fold"}[R])))',
        ),
    ),
    panel(
        "lines",
        "Returning",
        "A result, from being queued until gRPC has taken it; p99 by shard. Grows when nodes do "
        "not read, or the link back is full.",
        "s",
        (
            "{{instance}}",
            "histogram_quantile(0.99, sum by (instance, le) "
            '(rate(thalweg_grpc_send_seconds_bucket{SHARD,role="server"}[R])))',
        ),
    ),
    panel(
        "lines",
        "Cores that sum",
        "Time spent summing in a second.",
        "none",
        (
            "{{instance}}",
            'sum by (instance) (rate(thalweg_shard_phase_seconds_sum{SHARD,phase="fold"}[R]))',
        ),
    ),
    Row("Memory"),
    panel(
        "lines",
        "Held, and its limit",
        "Payloads that wait for other nodes' contributions; what the jobs' windows allow.",
        "bytes",
        ("{{instance}}", "sum by (instance) (thalweg_shard_held_bytes{SHARD})"),
        ("limit of {{instance}}", "sum by (instance) (thalweg_shard_held_limit_bytes{SHARD})"),
    ),
    panel(
        "lines",
        "Results that wait to be sent",
        "Bytes of frames that gRPC has not taken yet.",
        "bytes",
        ("{{instance}}", 'sum by (instance) (thalweg_grpc_queued_bytes{SHARD,role="server"})'),
    ),
    panel(
        "lines",
        "Residuals",
        "What encoding results has left out so far, of all jobs with a lossy format.",
        "bytes",
        ("{{instance}}", "sum by (instance) (thalweg_shard_residual_bytes{SHARD})"),
    ),
    panel(
        "lines",
        "Jobs and nodes",
        "On the shard that has most.",
        "none",
        ("jobs", "max(thalweg_shard_jobs{SHARD})"),
        ("nodes", "max(thalweg_shard_nodes{SHARD})"),
    ),
    panel(
        "table",
        "Versions",
        "What runs where.",
        "none",
        "thalweg_build_info{SHARD}",
        width=24,
    ),
    panel(
        "lines",
        "Certificates",
        "Time until a certificate expires: the own one, and the first of the CA's. Empty without "
        "TLS.",
        "s",
        (
            "{{instance}} {{certificate}}",
            "thalweg_tls_certificate_expiry_timestamp_seconds{SHARD} - time()",
        ),
        change=signed,
        width=24,
    ),
    Row("Weights"),
    panel(
        "lines",
        "Cores that update",
        "Time for optimizers' steps on weights that shards keep, per second.",
        "none",
        (
            "{{instance}}",
            'sum by (instance) (rate(thalweg_shard_phase_seconds_sum{SHARD,phase="update"}[R]))',
        ),
    ),
    panel(
        "lines",
        "Age of the latest snapshot",
        "Of all jobs; a day means that there is none, or none for longer. Needs aggregators with "
        "--state-dir.",
        "s",
        (
            "{{instance}}",
            "clamp_max(time() - thalweg_shard_snapshot_timestamp_seconds{SHARD}, 86400)",
        ),
    ),
    panel(
        "lines",
        "Snapshots by outcome",
        "Those that are not ok were left out: the shard's log says why.",
        "short",
        ("{{outcome}}", "sum by (outcome) (increase(thalweg_shard_snapshots_total{SHARD}[R]))"),
    ),
    panel(
        "lines",
        "Bytes of snapshots",
        "Written to the shards' disks, per second.",
        "Bps",
        ("{{instance}}", "sum by (instance) (rate(thalweg_shard_snapshot_bytes_total{SHARD}[R]))"),
    ),
)
