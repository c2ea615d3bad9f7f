"""Triton source only; `attention/backends/fused.py` launches it. Importing this folder loads nothing."""
