"""Losses, with upstream's names."""
