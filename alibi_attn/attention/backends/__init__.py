"""One module, or folder, a way to compute the same attention, as `protocol.py` says; they never import one another."""
