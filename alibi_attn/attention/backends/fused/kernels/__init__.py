"""Triton source only; `backends/fused/backend.py` launches it. Importing this folder loads nothing."""
