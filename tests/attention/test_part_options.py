"""Windows per head, sinks, prefixes and positions: wrong ones are refused, with what to do."""

import pytest
import torch
from parts_oracle import truth

from alibi_attn.attention.api import alibi_attention, certified_block_mask
from alibi_attn.attention.forgetting import forgetting_attention
from alibi_attn.attention.toeplitz import toeplitz_attention
from alibi_attn.attention.varlen import alibi_attention_varlen

WINDOWS = [5, 9, 400, 9]


def stamps(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float64).expand(2, -1) * 0.5


def drawn(t: int, s: int) -> list[torch.Tensor]:
    return [*(torch.randn(2, h, n, 16) for h, n in ((4, t), (2, s), (2, s))), torch.tensor([0.5, 0.2, 0.1, 0.02])]


REFUSED = [
    ({"prefix_len": torch.tensor([3, 91])}, ValueError, "prefix_len is 91 .* from 0 to 90, S"),
    ({"prefix_len": torch.tensor([3])}, ValueError, r"prefix_len has shape \[1\] but must be \[B\] = \[2\]"),
    ({"prefix_len": torch.tensor([3.0, 4.0])}, TypeError, "prefix_len is float32 but must hold integers"),
    ({"prefix_len": 3}, TypeError, "prefix_len must be a torch.Tensor but is int"),
    ({"prefix_len": torch.tensor([3, 4]), "causal": False}, ValueError, "prefix_len is for causal attention"),
    ({"window": [3, 4]}, ValueError, r"window is \[3, 4\] but must be an integer, or \[H\] = 4 integers"),
    ({"window": [3, 4, 0, 5]}, ValueError, r"window is \[3, 4, 0, 5\] .* at least 1"),
    ({"window": [3, 4, 1.5, 5]}, ValueError, "must be an integer"),
    ({"window": [3, 4, True, 5]}, ValueError, "must be an integer"),
    ({"window": torch.ones(4)}, TypeError, "window is float32 but must hold integers"),
    (
        {"window": torch.ones(4, dtype=torch.int64, device="meta")},
        TypeError,
        "traced or on another device; pass a list of integers",
    ),
    ({"window": 4, "sinks": -1}, ValueError, "sinks is -1"),
    ({"window": 4, "sinks": torch.ones(4)}, TypeError, "sinks is a tensor .* learned logits are sink_logits"),
    ({"positions": stamps(89)}, ValueError, r"positions has shape \[2, 89\] but must be \[B, S\] = \[2, 90\]"),
    ({"positions": torch.arange(90).expand(2, -1)}, TypeError, r"positions is int64 .* pass positions.double\(\)"),
    ({"positions": -stamps(90)}, ValueError, "positions must be finite and must not decrease"),
    ({"positions": stamps(90), "query_offset": 0}, ValueError, "positions and query_offset exclude one another"),
    ({"positions": stamps(90).requires_grad_()}, ValueError, r"pass positions.detach\(\)"),
    ({"query_positions": stamps(90)}, ValueError, "query_positions is given without positions"),
    ({"positions": stamps(90), "query_positions": stamps(90) - 9}, ValueError, "query_positions must not precede"),
    (
        {"positions": stamps(90), "query_positions": stamps(90) + 9, "prefix_len": torch.tensor([3, 4])},
        ValueError,
        "query_positions has a query after the next key of its prefix",
    ),
    (
        {"positions": stamps(90), "query_positions": stamps(90) + 9, "causal": False, "window": 9},
        ValueError,
        "window counts indices, but query_positions are not those of keys",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alibi_attention(*drawn(90, 90), **options)


@pytest.mark.parametrize("backend", ["dense", "native"])
def test_queries_beyond_their_prefix_may_lie_anywhere_after_it(backend: str) -> None:
    q, k, v, slopes = drawn(40, 90)
    options = {"positions": stamps(90), "query_positions": stamps(90)[:, 50:] + 9, "prefix_len": torch.tensor([3, 51])}
    expected, _ = truth(q, k, v, slopes, **options)
    found = alibi_attention(q, k, v, slopes, backend=backend, **options)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_functions_without_parts_refuse_them() -> None:
    q, k, v, slopes = drawn(90, 90)
    with pytest.raises(ValueError, match="forgetting_attention does not support window per head"):
        forgetting_attention(q, k, v, torch.zeros(2, 4, 90), window=WINDOWS)
    with pytest.raises(ValueError, match="toeplitz_attention does not support window per head"):
        toeplitz_attention(q, k, v, torch.zeros(4, 90), window=WINDOWS)
    with pytest.raises(ValueError, match="certified_block_mask does not support prefix_len"):
        certified_block_mask(q, k, slopes, prefix_len=torch.tensor([3, 4]))
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="alibi_attention_varlen does not support window per head"):
        alibi_attention_varlen(*packed, torch.tensor([0, 90], dtype=torch.int32), window=WINDOWS)
    with pytest.raises(TypeError, match=r"prefix_len.*alibi_attention has it, this function does not"):
        forgetting_attention(q, k, v, torch.zeros(2, 4, 90), prefix_len=torch.tensor([3, 4]))
