"""Traces of a job's processes, joined on one axis of time (docs/timeline.md)."""
