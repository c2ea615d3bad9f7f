"""Hypothesis's search for an attack on the certificate. In its own file, because a GPU's machine may not have Hypothesis."""

from certificate_attack import MASKS, WHERE, Attack
from hypothesis import strategies as st

attacks = st.builds(
    Attack,
    seed=st.integers(0, 2**20),
    length=st.integers(1, 300),
    head_dim=st.integers(1, 8),
    slope=st.floats(-16, 2).map(lambda x: 2.0**x),
    tolerance=st.floats(-12, -1).map(lambda x: 10.0**x),
    where=st.sampled_from(WHERE),
    mask=st.sampled_from(MASKS),
    causal=st.booleans(),
    group=st.integers(1, 3),
    log_query=st.floats(-25, 25) | st.floats(-1, 1),
    log_key=st.floats(-25, 25) | st.floats(-1, 1),
    log_giant=st.floats(0, 25) | st.floats(0, 2),
    dtype=st.sampled_from(("float32", "float64", "bfloat16", "float16")),
    refine=st.booleans(),
)
