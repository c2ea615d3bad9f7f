"""Benchmarks: cases × peers in one process, correctness before anything is timed, and a record of what came out.

`peers.py` has what users would pick instead, as they write it; `exactness.py` holds it against fp64; `timing.py` measures,
`cases.py` makes inputs, `cpu.py`, `gpu.py` and `decoding.py` run the comparison, and records grow with it (`columns.py`).
"""
