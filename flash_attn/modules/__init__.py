"""Attention, feed-forward and transformer-block modules, with upstream's names and state_dict keys."""
