"""Activation without code: what the environment asks of scripts (docs/zero_code.md)."""
