"""C++ source of the kernels for CPUs, and the module that compiles it. Importing this folder loads nothing.

Read `vectors.hpp` (vectors, exp, a matrix product in registers), `block.hpp` (a block of queries and its scores), `forward.cpp`
and `backward.cpp`; `attention/backends/native.py` calls them.
"""
