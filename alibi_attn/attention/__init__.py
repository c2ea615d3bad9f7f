"""One function, `alibi_attention`, and many backends that compute the same thing (PyTorch).

Start with `spec.py` (what is computed, and the legend of shapes), then `api.py`, then `backends/reference.py`.
"""
