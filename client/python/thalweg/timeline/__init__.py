"""Joins the traces of a job's processes on one time axis (docs/timeline.md)."""
