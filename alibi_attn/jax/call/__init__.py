"""A call in JAX: checked, planned, and split into parts."""
