"""Rotary position embedding and patch embedding, with upstream's names."""
