"""CPU: our C++ kernels and the module that compiles them. Importing this folder loads nothing.

Start with `backend.py`, which calls the kernels. Then read `vectors.hpp` (vectors, exp, a matrix product in registers),
`block.hpp` (a block of queries and its scores), `certificate.hpp`, `forward.cpp` and `backward.cpp`. `levels.py` lists the
instruction levels that `build.py` compiles for; `visited.py` decodes which keys the kernels read.
"""
