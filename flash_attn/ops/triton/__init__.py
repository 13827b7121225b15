"""Upstream's module names. Nothing here imports or needs Triton."""
