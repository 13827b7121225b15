"""Tensor-parallel collectives and inference state, with upstream's names."""
