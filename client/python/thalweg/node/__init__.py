"""Implements path C: a node's workers sum, one speaks to the sidecar (docs/gpu.md)."""

from thalweg.node._reduce import Node, join

__all__ = ["Node", "join"]
