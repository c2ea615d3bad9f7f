"""GPU: kernels in Triton. Read `backend.py`, `plan.py`, `full_tiles.py`, then `kernels/`; tile sizes are in `configs.py`."""
