"""Benchmarks: cases × peers in one process, correctness before anything is timed, and a record of what came out.

`timing.py` measures, `cases.py` makes inputs, `peers.py` lists what users would pick instead, `cpu.py` runs the comparison.
"""
