"""Implements `thalweg bench`: Thalweg and its peers, alternating on the same links."""
