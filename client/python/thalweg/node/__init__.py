"""Path C: the workers of a node sum their gradients, one speaks to the sidecar (docs/gpu.md)."""

from thalweg.node._reduce import Node, join

__all__ = ["Node", "join"]
