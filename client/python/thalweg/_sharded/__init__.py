"""Compression of models that torch shards by fully_shard(), which thalweg.fsdp offers."""
