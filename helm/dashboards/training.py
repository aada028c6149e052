"""Lists what the dashboard of a training job shows."""

from __future__ import annotations

from panels import Panel, Row, bounded, decimals, logarithmic, panel, stacked

TITLE = "Training job"
DESCRIPTION = (
    "What aggregation costs a training job, and what compression does to it. "
    "Choose the job's nodes."
)
VARIABLES = ("sidecars", "node", "aggregators")
PANELS: tuple[Panel | Row, ...] = (
    panel(
        "stat",
        "Steps",
        "Steps per second that exchange gradients, on the average node.",
        "ops",
        "avg(rate(thalweg_sidecar_steps_total{NODE}[R]))",
        change=decimals(2),
    ),
    panel(
        "stat",
        "Exchanging",
        "Share of time in which a node has gradients under way. What lies under the backward "
        "pass costs nothing: this is the most that communication can take of a step.",
        "percentunit",
        "avg(rate(thalweg_sidecar_exchange_seconds_total{NODE}[R]))",
        change=bounded,
    ),
    panel(
        "stat",
        "Compression, sent",
        "Bytes of gradients over bytes that leave the nodes.",
        "suffix:x",
        'sum(rate(thalweg_sidecar_raw_bytes_total{NODE,direction="sent"}[R])) / '
        'sum(rate(thalweg_sidecar_wire_bytes_total{NODE,direction="sent"}[R]))',
        change=decimals(1),
    ),
    panel(
        "stat",
        "Left out",
        "Norm of what compression has left out for later, over the norm of what was to be sent; "
        "the worst node's, sampled once in 100 rounds.",
        "percentunit",
        "max(thalweg_sidecar_compression_error_ratio{NODE})",
        change=decimals(1, ("orange", 0.998)),
    ),
    panel(
        "stat",
        "NaN or infinite",
        "Share of buckets whose mean has such values. A few come with a dynamic loss scale.",
        "percentunit",
        "sum(rate(thalweg_sidecar_nonfinite_buckets_total{NODE}[R])) / "
        "sum(rate(thalweg_sidecar_buckets_total{NODE}[R]))",
        change=decimals(1, ("red", 0.1)),
    ),
    panel(
        "stat",
        "Workers",
        "Connected to the chosen nodes' sidecars.",
        "none",
        "sum(thalweg_sidecar_workers{NODE})",
    ),
    Row("Communication in a step"),
    panel(
        "lines",
        "Time in a step, by phase",
        "Time of all buckets of a step in each phase, on the average node. Phases of buckets "
        "overlap each other and the backward pass. wait: for the node's own workers; reduce: "
        "folding and encoding; wire: sending, waiting for the slowest node, summing, and back.",
        "s",
        (
            "{{phase}}",
            "sum by (phase) (rate(thalweg_sidecar_phase_seconds_sum{NODE}[R])) / on () "
            "group_left () sum(rate(thalweg_sidecar_steps_total{NODE}[R]))",
        ),
    ),
    panel(
        "lines",
        "Share of time with gradients under way",
        "By node. A node that is always exchanging waits for the network or for others; one that "
        "rarely is may be whom they wait for.",
        "percentunit",
        (
            "{{instance}}",
            "sum by (instance) (rate(thalweg_sidecar_exchange_seconds_total{NODE}[R]))",
        ),
        change=bounded,
    ),
    panel(
        "lines",
        "A bucket, from ready to averaged",
        "Of all buckets: half take less than the median, one in a hundred more than p99.",
        "s",
        (
            "median",
            "histogram_quantile(0.5, sum by (le) "
            "(rate(thalweg_sidecar_bucket_seconds_bucket{NODE}[R])))",
        ),
        (
            "p99",
            "histogram_quantile(0.99, sum by (le) "
            "(rate(thalweg_sidecar_bucket_seconds_bucket{NODE}[R])))",
        ),
    ),
    panel(
        "lines",
        "A bucket on the wire",
        "From its first chunk sent to its last result.",
        "s",
        (
            "median",
            "histogram_quantile(0.5, sum by (le) "
            '(rate(thalweg_sidecar_phase_seconds_bucket{NODE,phase="wire"}[R])))',
        ),
        (
            "p99",
            "histogram_quantile(0.99, sum by (le) "
            '(rate(thalweg_sidecar_phase_seconds_bucket{NODE,phase="wire"}[R])))',
        ),
    ),
    Row("Stragglers"),
    panel(
        "lines",
        "Waiting for a node",
        "What chunks wait on the shards, by the node whose contribution is the last. Chunks wait "
        "at the same time, so that a second can have more than one. Nodes are numbered in the "
        "order of their lowest rank; jobs that share shards are added up.",
        "s",
        (
            "node {{node}}",
            "topk(5, sum by (node) (rate(thalweg_shard_waited_for_seconds_total{SHARDS}[R])))",
        ),
    ),
    panel(
        "lines",
        "A chunk's wait for the slowest node",
        "From its first contribution to its last.",
        "s",
        (
            "median",
            "histogram_quantile(0.5, sum by (le) "
            '(rate(thalweg_shard_phase_seconds_bucket{SHARDS,phase="wait_for_slowest"}[R])))',
        ),
        (
            "p99",
            "histogram_quantile(0.99, sum by (le) "
            '(rate(thalweg_shard_phase_seconds_bucket{SHARDS,phase="wait_for_slowest"}[R])))',
        ),
    ),
    panel(
        "lines",
        "Waiting for own workers",
        "A bucket's wait for the last worker of the node, on average: the workers of a node that "
        "stands out differ from each other.",
        "s",
        (
            "{{instance}}",
            'sum by (instance) (rate(thalweg_sidecar_phase_seconds_sum{NODE,phase="wait"}[R])) / '
            'sum by (instance) (rate(thalweg_sidecar_phase_seconds_count{NODE,phase="wait"}[R]))',
        ),
    ),
    panel(
        "lines",
        "Waiting for a shard",
        "Time in a second for which the average node waited to send: a shard owed it results. "
        "Lanes of buckets wait side by side: a second can have more than one.",
        "s",
        (
            "shard {{shard}}",
            "avg by (shard) (rate(thalweg_sidecar_shard_wait_seconds_total{NODE}[R]))",
        ),
    ),
    Row("Compression"),
    panel(
        "lines",
        "Bytes",
        "Gradients of the chosen nodes before encoding, and what crosses the network.",
        "Bps",
        (
            "gradients {{direction}}",
            "sum by (direction) (rate(thalweg_sidecar_raw_bytes_total{NODE}[R]))",
        ),
        (
            "network {{direction}}",
            "sum by (direction) (rate(thalweg_sidecar_wire_bytes_total{NODE}[R]))",
        ),
    ),
    panel(
        "lines",
        "Compression by codec",
        "Bytes of gradients over bytes on the network.",
        "suffix:x",
        (
            "{{codec}} {{direction}}",
            "sum by (codec, direction) (rate(thalweg_sidecar_raw_bytes_total{NODE}[R])) / sum by "
            "(codec, direction) (rate(thalweg_sidecar_wire_bytes_total{NODE}[R]))",
        ),
    ),
    panel(
        "lines",
        "Left out",
        "As above, by node.",
        "percentunit",
        ("{{instance}}", "thalweg_sidecar_compression_error_ratio{NODE}"),
        change=bounded,
    ),
    panel(
        "lines",
        "Norm of the residual",
        "Of what compression has left out so far. It levels off; one that keeps growing means "
        "that less gets across than comes in.",
        "none",
        ("{{instance}}", "thalweg_sidecar_residual_norm{NODE}"),
    ),
    panel(
        "lines",
        "Compressed buckets",
        "Share of buckets that went compressed, and of those that had to go whole because a "
        "factor was not finite.",
        "percentunit",
        (
            "compressed",
            "sum(rate(thalweg_sidecar_compressed_buckets_total{NODE}[R])) / "
            "sum(rate(thalweg_sidecar_buckets_total{NODE}[R]))",
        ),
        (
            "given up",
            "sum(rate(thalweg_sidecar_given_up_buckets_total{NODE}[R])) / "
            "sum(rate(thalweg_sidecar_buckets_total{NODE}[R]))",
        ),
        change=bounded,
    ),
    panel(
        "lines",
        "What auto has chosen",
        "Buckets by the codec that auto has chosen for them, on the average node. Empty unless "
        "the job's codec is auto.",
        "none",
        ("{{codec}}", "avg by (codec) (thalweg_sidecar_auto_buckets{NODE})"),
        change=stacked,
    ),
    panel(
        "lines",
        "What auto has predicted",
        "What each codec would add to a step. Empty unless the job's codec is auto.",
        "s",
        ("{{codec}}", "avg by (codec) (thalweg_sidecar_auto_predicted_seconds{NODE})"),
    ),
    panel(
        "lines",
        "Path of gradients",
        "Workers by the way that their gradients take to the sidecar.",
        "none",
        ("{{path}}", "sum by (path) (thalweg_sidecar_workers{NODE})"),
        change=stacked,
    ),
    panel(
        "lines",
        "Iteration in which compression began",
        "From 1; 0 means not yet.",
        "none",
        ("iteration", "max(thalweg_sidecar_compression_start_iteration{NODE})"),
    ),
    Row("Mixed precision"),
    panel(
        "lines",
        "Loss scale",
        "Of the latest backward pass: as its loss scaler has it; 1: there is none. A dynamic "
        "scale doubles every 2000 steps and halves where one is skipped. One that falls without "
        "an end: the gradients really are infinite.",
        "none",
        ("loss scale", "max(thalweg_sidecar_loss_scale{NODE})"),
        change=logarithmic,
    ),
    panel(
        "lines",
        "Skipped steps per minute",
        "Steps in which no parameter was updated, because the scaled gradients were not finite. "
        "One now and then is how a dynamic scale finds its size.",
        "none",
        ("skipped steps", "60 * max(rate(thalweg_sidecar_skipped_steps_total{NODE}[R]))"),
    ),
    Row("Weights that shards update"),
    panel(
        "lines",
        "Waiting for weights in a step",
        "Time for which the first worker of a node waits in a step for weights that shards have "
        "updated, by quarter of the model in the order of the forward pass. The first quarter "
        "waits longest when the shards are late; what later quarters wait for has not come under "
        "the layers before.",
        "s",
        (
            "quarter {{quarter}}",
            "sum by (quarter) (rate(thalweg_sidecar_weights_wait_seconds_total{NODE}[R])) / on "
            "() group_left () sum(rate(thalweg_sidecar_steps_total{NODE}[R]))",
        ),
    ),
)
