"""How a worker becomes a member of a job: workers meet, find sidecars and shards, and connect."""
