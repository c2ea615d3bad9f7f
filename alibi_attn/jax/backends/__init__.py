"""The ways to compute attention in JAX: C++ kernels, XLA (all scores, or a loop over tiles) and Triton kernels."""
