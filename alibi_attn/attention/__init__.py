"""`alibi_attention` and the backends that compute it (PyTorch).

Start with `spec.py` (what is computed, and the legend of shapes), then `api.py`, then `backends/reference.py`.
"""
