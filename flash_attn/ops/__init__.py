"""Activations, norms and linear layers around attention, with upstream's names. Plain torch on every device."""
