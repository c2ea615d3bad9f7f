"""Backends, one module or folder each, with the interface of `protocol.py`; they never import one another."""
