"""Wrong arguments of every function of attention: the error says what was passed, what is allowed and what to do."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from alibi_attn import (
    alibi_attention,
    alibi_attention_varlen,
    alibi_bias,
    attention_rows,
    certified_block_mask,
    explain,
    forgetting_attention,
    toeplitz_attention,
)

ROWS = dict.fromkeys(("query", "key", "value"), torch.ones(2, 4, 9, 8))
TWO_ROWS = {"query": ROWS["query"], "key": ROWS["key"]}
PACKED = dict.fromkeys(("query", "key", "value"), torch.ones(40, 4, 8)) | {"cu_seqlens": torch.tensor([0, 13, 40])}
# Every function, and arguments that it takes.
FUNCTIONS = {
    "alibi_attention": (alibi_attention, ROWS),
    "forgetting_attention": (forgetting_attention, ROWS | {"log_fgate": -torch.ones(2, 4, 9)}),
    "toeplitz_attention": (toeplitz_attention, ROWS | {"table": torch.zeros(4, 9)}),
    "alibi_attention_varlen": (alibi_attention_varlen, PACKED),
    "attention_rows": (attention_rows, TWO_ROWS | {"rows": [0]}),
    "certified_block_mask": (certified_block_mask, TWO_ROWS),
    "explain": (explain, ROWS),
    "alibi_bias": (alibi_bias, {"slopes": [0.5], "query_len": 3}),
}
HUGE, HUGER = 2**70, 10**400
IDS = torch.zeros(2, 9, dtype=torch.int64)
WINDOWS = [5, 9, 400, 9]
PREFIX = torch.tensor([3, 4])
TIMES = torch.arange(9, dtype=torch.float64).expand(2, -1) * 0.5
PLANE = {"causal": False, "positions": torch.zeros(2, 9, 2)}


def every(x: Tensor) -> dict[str, Tensor]:
    return dict.fromkeys(ROWS, x)


def keys(x: Tensor) -> dict[str, Tensor]:
    return {"key": x, "value": x}


def gate(x: float) -> dict[str, Tensor]:
    """One gate of this logarithm among others."""
    return {"log_fgate": torch.where(torch.arange(72).view(2, 4, 9) == 50, x, -1.0)}


def borders(*starts: object) -> dict[str, Tensor]:
    return {"cu_seqlens": torch.tensor(starts, dtype=None if starts and isinstance(starts[0], float) else torch.int64)}


REFUSED = {
    ("alibi_attention", ValueError): [
        ({"query": torch.ones(4, 9, 8)}, "four axes"),
        (keys(torch.ones(3, 4, 9, 8)), "batch and head size"),
        ({"value": torch.ones(2, 4, 8, 8)}, "value has shape"),
        (keys(torch.ones(2, 3, 9, 8)), "must divide"),
        (every(torch.ones(2, 4, 9, 0)), "D, the size"),
        ({"key": torch.ones(2, 4, 9, 8, device="meta")}, "pass key.to"),
        ({"slopes": [0.5, 0.25]}, r"2 entries but query has 4 heads; pass alibi_slopes\(4\)"),
        ({"slopes": [0.5] * 9}, r"4 heads and 9 positions: .* query.swapaxes\(1, 2\)"),
        ({"slopes": torch.ones(3, 4)}, "must be .H."),
        *(({"slopes": [0.5, x, 1, 1]}, "slopes must be finite") for x in (math.nan, math.inf, HUGER, -HUGER)),
        ({"right_slopes": [1, 1, 1, 1]}, "causal=False"),
        ({"causal": False, "right_slopes": [1, math.nan, 1, 1]}, "never attends to the"),
        ({"scale": math.inf}, "finite"),
        ({"dropout_p": 1.0}, "probability"),
        *(({"tolerance": x}, "softmax mass") for x in (1.0, -0.1)),
        ({"key_mask": torch.ones(2, 8, dtype=torch.bool)}, "key_mask has shape .* one flag per"),
        ({"segment_ids": IDS[:, :8]}, "segment_ids has shape"),
        ({"segment_ids": (IDS, IDS, IDS)}, "3 parts"),
        *(({"segment_ids": IDS, "query_offset": x}, "pass a pair") for x in (1, torch.tensor(1))),
        ({"query_offset": torch.arange(3)}, "query_offset has shape"),
        *(
            ({"query_offset": x}, "query_offset is .* but positions lie between")
            for x in (HUGE, -HUGE, torch.tensor(2**63 - 1), torch.full((2,), -(2**62)))
        ),
        *(({"backend": x}, r"backend is .* but must be 'auto' or one of 'reference'") for x in ("best", ["native"])),
        ({"backend": "banded", "dropout_p": 0.1}, "cannot run this"),
        ({"key_bias": torch.zeros(2, 4, 8)}, r"key_bias has shape \[2, 4, 8\] but must be \[B, H, S\] = \[2, 4, 9\]"),
        ({"key_bias": torch.zeros(3, 1, 9)}, "broadcastable to it"),
        *(({"key_bias": torch.zeros(shape)}, "key_bias has shape") for shape in ((1, 2, 4, 9), (2, 4, 1))),
        ({"key_bias": torch.full((9,), math.nan)}, r"NaN or \+inf"),
        ({"key_bias": torch.full((9,), math.inf)}, "−inf for a hidden key"),
        ({"sink_logits": torch.zeros(3)}, r"sink_logits has shape \[3\] but must be \[H\] = \[4\]"),
        ({"sink_logits": torch.zeros(2, 4)}, "one logit per query head"),
        ({"sink_logits": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "no weight for any key"),
        ({"sink_logits": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "NaN"),
        ({"prefix_len": torch.tensor([3, 10])}, "prefix_len is 10 .* from 0 to 9, S"),
        ({"prefix_len": torch.tensor([3])}, r"prefix_len has shape \[1\] but must be \[B\] = \[2\]"),
        ({"prefix_len": PREFIX, "causal": False}, "prefix_len is for causal attention"),
        ({"window": 0}, "at least 1"),
        ({"window": [3, 4]}, r"window is \[3, 4\] but must be an integer, or \[H\] = 4 integers"),
        ({"window": [3, 4, 0, 5]}, r"window is \[3, 4, 0, 5\] .* at least 1"),
        *(({"window": [3, 4, x, 5]}, "must be an integer") for x in (1.5, True)),
        ({"window": 4, "sinks": -1}, "sinks is -1"),
        ({"positions": TIMES[:, 1:]}, r"positions has shape \[2, 8\] but must be \[B, S\] = \[2, 9\]"),
        ({"positions": -TIMES}, "positions must be finite and must not decrease"),
        ({"positions": TIMES, "query_offset": 0}, "positions and query_offset exclude one another"),
        ({"positions": TIMES.clone().requires_grad_()}, r"pass positions.detach\(\)"),
        ({"query_positions": TIMES}, "query_positions is given without positions"),
        ({"positions": TIMES, "query_positions": TIMES - 9}, "query_positions must not precede"),
        (
            {"positions": TIMES, "query_positions": TIMES + 9, "prefix_len": PREFIX},
            "query_positions has a query after the next key of its prefix",
        ),
        (
            {"positions": TIMES, "query_positions": TIMES + 9, "causal": False, "window": 9},
            "window counts indices, but query_positions are not those of keys",
        ),
        (PLANE | {"causal": True}, "have no left and right: pass causal=False"),
        (PLANE | {"window": 5}, "exclude window; omit them"),
        (PLANE | {"query_offset": 0}, "exclude query_offset"),
        (PLANE | {"right_slopes": [0.1] * 4}, "exclude right_slopes"),
        (PLANE | {"positions": torch.zeros(2, 9, 4)}, r"must be \[B, S, 2 or 3\] = \[2, 9, 2 or 3\]"),
        (PLANE | {"positions": torch.full((2, 9, 2), math.nan)}, "positions must be finite"),
        (PLANE | {"positions": torch.zeros(2, 9, 2, requires_grad=True)}, "receives no gradient"),
        (PLANE | {"query_positions": torch.zeros(2, 9, 3)}, r"must be \[B, T, 2\]"),
        (PLANE | {"registers": -1}, "registers is -1 but must be"),
        ({"registers": 2}, "registers are symmetric"),
        ({"invariant": True, "backend": "dense"}, "backend 'dense' cannot run this.*use backend='native'"),
        ({"invariant": True, "tolerance": 1e-6}, "is 1e-06 but invariant=True computes every visible score"),
        ({"invariant": True, "causal": False}, "invariant=True does not support causal=False; use invariant=False, or"),
        ({"invariant": True, "key_bias": torch.zeros(9), "dropout_p": 0.5}, "does not support key_bias, dropout_p"),
        ({"invariant": True, "window": WINDOWS}, "does not support window per head"),
    ],
    ("alibi_attention", TypeError): [
        ({"query": [1.0]}, "torch.Tensor"),
        ({"key": torch.ones(2, 4, 9, 8).double()}, "share one dtype"),
        (every(torch.ones(2, 4, 9, 8, dtype=torch.int64)), "share one dtype"),
        *(
            ({"slopes": slopes}, "slopes must be real numbers")
            for slopes in (["a"] * 4, [None, 0.1, 0.1, 0.1], {0.1, 0.2, 0.3, 0.4}, [[0.1] * 4, [0.2] * 3])
        ),
        ({"slopes": np.full(4, 1j)}, "slopes is an array of complex128 but must hold real numbers"),
        ({"window": 2.0}, "integer"),
        ({"window": torch.ones(4)}, "window is float32 but must hold integers"),
        ({"window": torch.ones(4, dtype=torch.int64, device="meta")}, "or on another device; pass a list of integers"),
        ({"window": 4, "sinks": torch.ones(4)}, "sinks is a tensor .* learned logits are sink_logits"),
        ({"scale": "1"}, "number"),
        ({"causal": 1}, "True or False"),
        ({"key_mask": torch.zeros(2, 9)}, "must be bool"),
        ({"segment_ids": torch.zeros(2, 9)}, "integers"),
        ({"query_offset": 1.0}, "int"),
        ({"query_offset": torch.tensor(1.0)}, "integer"),
        ({"key_bias": torch.zeros(9, dtype=torch.bfloat16)}, "bfloat16 but must be float32 or float64"),
        ({"key_bias": torch.zeros(9, dtype=torch.int64)}, "int64 but must be float32 or float64"),
        ({"key_bias": [0.0] * 9}, "key_bias must be a torch.Tensor but is list"),
        ({"sink_logits": torch.zeros(4, dtype=torch.int64)}, "sink_logits is int64"),
        ({"sink_logits": [0.0] * 4}, "must be a torch.Tensor"),
        ({"prefix_len": torch.tensor([3.0, 4.0])}, "prefix_len is float32 but must hold integers"),
        ({"prefix_len": 3}, "prefix_len must be a torch.Tensor but is int"),
        ({"positions": IDS}, r"positions is int64 .* pass positions.double\(\)"),
        (PLANE | {"positions": torch.zeros(2, 9, 2).long()}, "must be float32 or float64"),
    ],
    ("forgetting_attention", ValueError): [
        (gate(0.1), "at most 0, the natural logarithm"),
        (gate(math.nan), r"NaN, \+inf or a positive number"),
        (gate(math.inf), "−inf for a cut"),
        ({"log_fgate": torch.zeros(2, 3, 9)}, r"must be \[B, H, S\] = \[2, 4, 9\]"),
        ({"log_fgate": torch.zeros(2, 4, 8)}, "log_fgate has shape"),
        ({"query_offset": torch.tensor(0)}, "does not support query_offset as an array"),
        *(({"query_offset": x}, "every query must be among the keys") for x in (3, -1)),
        ({"backend": "banded"}, "it does not compute key_bias, log_fgate"),
        ({"window": WINDOWS}, "forgetting_attention does not support window per head"),
    ],
    ("forgetting_attention", TypeError): [
        ({"log_fgate": torch.zeros(2, 4, 9, dtype=torch.bfloat16)}, "must be float32 or float64"),
        ({"log_fgate": [0.0]}, "log_fgate must be a torch.Tensor but is list"),
        ({"causal": False}, "causal"),
        ({"prefix_len": PREFIX}, r"prefix_len.*alibi_attention has it, this function does not"),
    ],
    ("toeplitz_attention", ValueError): [
        ({"table": torch.zeros(4, 8)}, "distances 0 to 7 but a query and a key are 8 apart; pass one with 9 columns"),
        ({"table": torch.zeros(3, 9)}, r"shape \[3, 9\] but must be \[H, N\] .* with H = 4"),
        ({"table": torch.zeros(9)}, r"shape \[9\] but must be \[H, N\]"),
        ({"table": torch.zeros(4, 20), "causal": False}, r"must be \[H, 2·N − 1\] .* to both sides"),
        ({"table": torch.zeros(4, 15), "causal": False}, "8 apart; pass one with 17 columns"),
        ({"query_offset": 5}, "13 apart; pass one with 14 columns"),
        ({"table": torch.full((4, 9), -math.inf)}, "NaN or inf in it but must be finite"),
        ({"query_offset": torch.tensor(0)}, "does not support query_offset as an array"),
        *(({"backend": x}, "it does not compute table") for x in ("banded", "flex")),
        ({"backend": "fused"}, "it runs on CUDA devices but query is on cpu"),
        ({"window": WINDOWS}, "toeplitz_attention does not support window per head"),
    ],
    ("toeplitz_attention", TypeError): [
        ({"table": torch.zeros(4, 9, dtype=torch.int64)}, "table is int64 but must be floating"),
        ({"table": [[0.0] * 9] * 4}, "table must be a torch.Tensor"),
    ],
    ("alibi_attention_varlen", ValueError): [
        (borders(0, 13, 39), r"is \[0, 13, 39\] but must begin with 0, never decrease, and end with N = 40"),
        (borders(1, 40), "must begin with 0"),
        (borders(0, 20, 13, 40), "never decrease"),
        (borders(0, *range(1, 30), 41), r"cu_seqlens is \[0, 1, 2, 3, 4, 5, 6, 7, …, 41\]"),
        (borders(), r"cu_seqlens has shape \[0\] but must be \[B \+ 1\]"),
        (borders([0, 40]), r"cu_seqlens has shape \[1, 2\]"),
        ({"query": torch.ones(1, 4, 40, 8)}, "query has shape .* but must have three axes"),
        ({"key": torch.ones(39, 4, 8)}, "every token has a query, a key and a value"),
        ({"value": torch.ones(40, 2, 8)}, "every token has a query, a key and a value"),
        ({"slopes": torch.rand(1, 4)}, r"slopes has 2 axes but must be \[H\], shared by all packed sequences"),
        ({"slopes": [[0.5] * 4]}, "slopes has 2 axes"),
        ({"slopes": [0.5] * 3}, "slopes has 3 entries but query has 4 heads"),
        ({"right_slopes": torch.rand(2, 4), "causal": False}, "right_slopes has 2 axes"),
        ({"key_bias": torch.zeros(1, 4, 40)}, r"key_bias has shape \[1, 4, 40\] but must be \[H, N\] = \[4, 40\]"),
        ({"key_bias": torch.zeros(4, 39)}, "key_bias has shape"),
        ({"positions": torch.rand(1, 40)}, r"positions has shape \[1, 40\] but must be \[N\] = \[40\]"),
        ({"positions": torch.rand(39)}, r"must be \[B, N\] = \[1, 40\]"),
        ({"positions": torch.arange(40.0).flip(0)}, "must not decrease along a row"),
        ({"positions": torch.arange(40.0).requires_grad_()}, "receives no gradient"),
        ({"backend": "fused"}, "backend 'fused' cannot run this"),
        ({"window": WINDOWS}, "alibi_attention_varlen does not support window per head"),
    ],
    ("alibi_attention_varlen", TypeError): [
        (borders(0.0, 40.0), "cu_seqlens is float32 but must be int32 or int64"),
        ({"cu_seqlens": [0, 40]}, "cu_seqlens must be a torch.Tensor but is list"),
        ({"query": None}, "query must be a torch.Tensor but is NoneType"),
        ({"positions": torch.arange(40)}, "positions is int64"),
    ],
    ("attention_rows", ValueError): [
        *(({"rows": x}, "there are 9 queries; pass indices from -9 to 8") for x in ([9], torch.tensor([0, -10]))),
        ({"slopes": [0.5]}, "pass alibi_slopes"),
        (gate(-1.0) | {"causal": False}, "with log_fgate does not support causal=False"),
        (gate(-1.0) | {"query_offset": torch.tensor(0)}, "with log_fgate does not support query_offset as an array"),
    ],
    ("attention_rows", TypeError): [
        *(
            ({"rows": rows}, "must be indices of queries")
            for rows in (3, [1.5], [True], torch.tensor([[1]]), torch.tensor([True]), "ab", None)
        ),
        *(
            ({name: None}, rf"attention_rows\(\) has no argument '{name}': ")
            for name in ("tolerance", "dropout_p", "return_lse", "backend")
        ),
        ({"is_causal": True}, r"attention_rows\(\) got an unexpected .*'is_causal'; here it is causal"),
    ],
    ("certified_block_mask", ValueError): [
        *(
            ({"block_size": size}, "must be a multiple of 64")
            for size in (0, 100, 32, -64, 128.0, True, (128,), (256, 100), (True, 64), [128, 128])
        ),
        ({"slopes": [0.5]}, "pass alibi_slopes"),
        ({"query": torch.ones(2, 4, 0, 8)}, "0 queries and 9 keys"),
        ({"prefix_len": PREFIX}, "certified_block_mask does not support prefix_len"),
        (dict.fromkeys(TWO_ROWS, torch.ones(2, 4, 9, 8, device="meta")), "query is on the meta device"),
    ],
    ("explain", ValueError): [(every(torch.ones(2, 4, 9, 8, device="meta")), "query is on the meta device")],
    ("alibi_bias", ValueError): [
        ({"query_len": 0}, "query_len is 0"),
        ({"key_len": 0}, "key_len is 0"),
        ({"slopes": [[0.5]]}, "slopes"),
        ({"right_slopes": [0.5]}, "right_slopes"),
        ({"causal": False, "right_slopes": [0.5, 1.0]}, "right_slopes"),
        ({"query_len": HUGE}, "query_len is"),
        ({"query_offset": HUGE}, "query_offset is"),
    ],
    ("alibi_bias", TypeError): [
        ({"query_len": torch.ones(1, 3)}, "query_len must be an integer, a number of positions, but is Tensor"),
    ],
}
CALLS = [(name, error, *row) for (name, error), rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("name", "error", "changes", "words"), CALLS)
def test_a_wrong_argument_is_refused_with_what_to_do(name: str, error: type, changes: dict, words: str) -> None:
    function, arguments = FUNCTIONS[name]
    with pytest.raises(error, match=words):
        function(**arguments | changes)
