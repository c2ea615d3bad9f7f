"""CPU: our kernels in C++, and the module that compiles them. Importing this folder loads nothing.

Read `backend.py`, which calls them; `vectors.hpp` (vectors, exp, a matrix product in registers), `block.hpp` (a block of queries
and its scores), `certificate.hpp`, `forward.cpp` and `backward.cpp`; `levels.py` has the levels of instructions that
`build.py` compiles for, `visited.py` is what they found.
"""
