"""Lists what the dashboard of faults shows."""

from __future__ import annotations

from panels import Panel, Row, alarming, panel, signed, whole

TITLE = "Faults"
DESCRIPTION = "What has gone wrong, and why. The runbooks say what to do."
VARIABLES = ("aggregators", "sidecars")
PANELS: tuple[Panel | Row, ...] = (
    panel(
        "stat",
        "Alerts",
        "Of Thalweg, firing now.",
        "none",
        'count(ALERTS{alertstate="firing",alertname=~"Thalweg.*"}) or vector(0)',
        change=alarming,
    ),
    panel(
        "stat",
        "Targets down",
        "Shards and sidecars that Prometheus cannot scrape. A sidecar ends with its job.",
        "none",
        'count(up{job=~"$aggregators|$sidecars"} == 0) or vector(0)',
    ),
    panel(
        "stat",
        "Jobs failed",
        "In the chosen time, on the shard that has seen most.",
        "none",
        "max(sum by (instance) "
        '(increase(thalweg_shard_jobs_ended_total{SHARDS,outcome!="ok"}[$__range])))',
        change=whole,
    ),
    panel(
        "stat",
        "Restarts",
        "Of aggregators in the chosen time: at the same address, or as another pod of the same "
        "name. Sidecars begin anew with each job.",
        "none",
        "(sum(changes(process_start_time_seconds{SHARDS}[$__range]) and on (job, instance) "
        'last_over_time(thalweg_build_info{SHARDS,program="aggregator"}[$__range])) or vector(0))'
        " + (sum(count by (job, namespace, pod) (max by (job, namespace, pod, instance) "
        '(last_over_time(thalweg_build_info{SHARDS,program="aggregator",pod!=""}[$__range]))) - 1) '
        "or vector(0))",
    ),
    Row("Why jobs and rounds end"),
    panel(
        "lines",
        "Jobs ended",
        "By outcome, on the shard that has seen most. deadline_exceeded: a node was late; "
        "unavailable: a node or shard was gone; aborted: a worker left; invalid_argument: "
        "workers disagree.",
        "none",
        (
            "{{outcome}}",
            "max by (outcome) (sum by (instance, outcome) "
            "(increase(thalweg_shard_jobs_ended_total{SHARDS}[R])) > 0) or vector(0)",
        ),
        change=whole,
    ),
    panel(
        "lines",
        "Rounds lost",
        "Chunk rounds that were open when their job failed, by reason.",
        "none",
        (
            "{{outcome}}",
            'sum by (outcome) (increase(thalweg_shard_rounds_total{SHARDS,outcome!="ok"}[R]) > '
            "0) or vector(0)",
        ),
        change=whole,
    ),
    panel(
        "lines",
        "Jobs ended, as nodes see it",
        "By outcome. Nodes' sidecars often end with their job, before they are scraped again.",
        "none",
        (
            "{{outcome}}",
            "sum by (outcome) (increase(thalweg_sidecar_jobs_ended_total{SIDECARS}[R]) > 0) or "
            "vector(0)",
        ),
        change=whole,
    ),
    panel(
        "lines",
        "Alerts",
        "Of Thalweg, firing.",
        "none",
        (
            "{{alertname}}",
            'sum by (alertname) (ALERTS{alertstate="firing",alertname=~"Thalweg.*"}) or vector(0)',
        ),
        change=whole,
    ),
    Row("Numbers"),
    panel(
        "lines",
        "NaN or infinite means",
        "Share of chunk rounds, by shard.",
        "percentunit",
        (
            "{{instance}}",
            "sum by (instance) (rate(thalweg_shard_nonfinite_rounds_total{SHARDS}[R])) / sum by "
            '(instance) (rate(thalweg_shard_rounds_total{SHARDS,outcome="ok"}[R]))',
        ),
    ),
    panel(
        "lines",
        "NaN or infinite elements",
        "Of the means, per second, on all shards.",
        "ops",
        ("elements", "sum(rate(thalweg_shard_nonfinite_elements_total{SHARDS}[R]))"),
    ),
    panel(
        "lines",
        "Factors given up",
        "Bucket rounds per second that went whole, because a factor was not finite.",
        "ops",
        ("buckets", "sum(rate(thalweg_sidecar_given_up_buckets_total{SIDECARS}[R]))"),
    ),
    panel(
        "lines",
        "Repeated contributions",
        "That shards have received twice and summed once.",
        "ops",
        (
            "{{instance}}",
            "sum by (instance) (rate(thalweg_shard_repeated_contributions_total{SHARDS}[R]))",
        ),
    ),
    Row("Standing still"),
    panel(
        "lines",
        "Waiting nodes",
        "Sidecars with a job of which neither a bucket nor a collective has completed lately.",
        "none",
        (
            "nodes",
            "count(thalweg_sidecar_jobs{SIDECARS} > 0 and on (job, instance) "
            "rate(thalweg_sidecar_buckets_total{SIDECARS}[R]) == 0 unless on (job, instance) "
            "rate(thalweg_sidecar_collectives_total{SIDECARS}[R]) > 0) or vector(0)",
        ),
        change=whole,
    ),
    panel(
        "lines",
        "Targets that answer",
        "Shards and sidecars.",
        "none",
        ("{{job}}", 'sum by (job) (up{job=~"$aggregators|$sidecars"})'),
        change=whole,
    ),
    panel(
        "lines",
        "Certificates",
        "Time until the first certificate expires, of shards and of sidecars. Empty without TLS.",
        "s",
        (
            "{{job}} {{certificate}}",
            "min by (job, certificate) "
            '(thalweg_tls_certificate_expiry_timestamp_seconds{job=~"$aggregators|$sidecars"}) - '
            "time()",
        ),
        change=signed,
    ),
)
