"""Benchmarks. Each one first compares every peer with fp64, then times the peers in turns, and writes a record.

`benchmarks.py` is the table of `alibi bench`; `harness.py` has the steps that all benchmarks share (inputs, check, turns, rows,
record); `truth.py` compares with fp64; `timing.py` measures; `peers/` has the alternatives, written as their users do.
"""
