"""`alibi_attention` and the backends that compute it (PyTorch).

Start with `spec.py` (the description of a call, and the legend of shapes), then `api.py`, then `backends/reference.py`.
"""
