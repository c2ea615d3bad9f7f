"""Wrong arguments in JAX, also under jit: the error says what was passed, what is allowed and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_attn.jax import alibi_attention, forgetting_attention

ROWS = dict.fromkeys(("query", "key", "value"), np.ones((2, 9, 4, 8), np.float32))
FUNCTIONS = {
    "alibi_attention": (alibi_attention, ROWS),
    "forgetting_attention": (forgetting_attention, ROWS | {"log_fgate": -np.ones((2, 4, 9), np.float32)}),
}
PREFIX = np.int32([3, 4])
TIMES = np.arange(9, dtype=np.float32) * np.ones((2, 1), np.float32)
PLANE = {"causal": False, "positions": np.zeros((2, 9, 2))}
ONE_GATE = np.where(np.arange(72).reshape(2, 4, 9) == 50, np.float32(0.1), np.float32(-1.0))
REFUSED = {
    ("alibi_attention", ValueError): [
        ({"query": np.ones((2, 9, 4, 9), np.float32)}, r"query \[B, T, H, D\], key \[B, S, K, D\]"),
        ({"slopes": np.ones(6)}, r"slopes has 6 entries but query has 4 heads; pass alibi_slopes\(4\)"),
        ({"slopes": [1.0, np.nan, 1.0, 1.0]}, "slopes must be finite"),
        ({"segment_ids": np.ones((2, 9), int), "query_offset": 3}, "pass a pair"),
        ({"dropout_p": 0.1}, "pass dropout_key"),
        ({"sink_logits": np.zeros(3, np.float32)}, "sink_logits"),
        ({"sink_logits": np.float32([0, np.inf, 0, 0])}, "sink_logits"),
        ({"backend": "flex"}, "'auto', 'native', 'loop', 'dense'"),
        *(
            ({"query_offset": x}, "positions must lie between")
            for x in (2**30, np.full(2, 2**40), np.int64(-(2**40)), jnp.full(2, 2**30))
        ),
        ({"key_bias": np.zeros((2, 4, 8), np.float32)}, r"has shape \[2, 4, 8\] but must be \[B, H, S\] = \[2, 4, 9\]"),
        ({"key_bias": np.full(9, np.nan)}, r"NaN or \+inf"),
        ({"prefix_len": np.int32([3, 10])}, "prefix_len is 10 .* from 0 to 9, S"),
        ({"positions": TIMES[:, 1:]}, r"positions has shape \[2, 8\] but must be \[B, S\] = \[2, 9\]"),
        ({"positions": -TIMES}, "positions must be finite and must not decrease"),
        ({"positions": TIMES, "query_positions": TIMES - 9}, "query_positions must not precede"),
        ({"positions": TIMES, "query_positions": TIMES + 9, "prefix_len": PREFIX}, "after the next key"),
        ({"window": 4, "sinks": -1}, "sinks is -1"),
        (PLANE | {"causal": True}, "have no left and right: pass causal=False"),
        (PLANE | {"positions": np.zeros((2, 9, 4))}, r"must be \[B, S, 2 or 3\]"),
        (PLANE | {"positions": np.full((2, 9, 2), np.nan)}, "positions must be finite"),
        ({"causal": False, "registers": 2, "query_offset": jnp.zeros((), jnp.int32)}, "pass an int"),
    ],
    ("alibi_attention", TypeError): [
        ({"attn_mask": None}, "unexpected keyword argument 'attn_mask'; here it is slopes for the bias"),
        ({"query_offset": 1.5}, "must be an int or an integer array"),
        ({"query": [1.0]}, "must be a jax.Array"),
        ({"key_bias": np.zeros((2, 4, 9), np.float16)}, "float16 but must be float32 or float64"),
        ({"key_bias": [0.0] * 9}, "key_bias must be a jax.Array or numpy array but is list"),
        ({"prefix_len": 3}, "prefix_len must be a jax.Array or numpy array but is int"),
        ({"window": np.ones(4)}, "window is float64 but must hold integers"),
        ({"window": {3}}, r"window must be an integer, one integer per head, or None but is \{3\}"),
    ],
    ("forgetting_attention", ValueError): [
        ({"log_fgate": ONE_GATE}, "at most 0, the natural logarithm"),
        ({"log_fgate": np.zeros((2, 3, 9), np.float32)}, r"must be \[B, H, S\] = \[2, 4, 9\]"),
        ({"query_offset": np.int32(0)}, "does not support query_offset as an array"),
        ({"query_offset": 3}, "every query must be among the keys"),
        ({"window": [5, 9, 400, 9]}, "forgetting_attention does not support window per head"),
    ],
    ("forgetting_attention", TypeError): [
        ({"log_fgate": [0.0]}, "log_fgate must be a jax.Array or numpy array but is list"),
        ({"causal": False}, r"forgetting_attention\(\) got an unexpected keyword argument 'causal'"),
        ({"prefix_len": PREFIX}, "unexpected keyword argument 'prefix_len'"),
        ({"attn_mask": None}, r"forgetting_attention\(\) got .* 'attn_mask'; here it is slopes"),
    ],
}
CALLS = [(name, error, *row) for (name, error), rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("name", "error", "changes", "words"), CALLS)
def test_a_wrong_argument_is_refused_with_what_to_do(name: str, error: type, changes: dict, words: str) -> None:
    function, arguments = FUNCTIONS[name]
    for call in (function, lambda **given: jax.jit(lambda: function(**given))()):
        with pytest.raises(error, match=words):
            call(**arguments | changes)
