"""Reads and writes checkpoints: `families/` has the tables, `encoder/` and `decoder/` the models, `checkpoint.py` the weights."""
