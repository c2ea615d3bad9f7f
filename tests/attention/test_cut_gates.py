"""Gates that close entirely, −inf or very negative: later results are as if nothing came before, in every digit."""

import math
from collections.abc import Callable

import pytest
import torch
from attention_checks import WITH_KEY_BIAS
from torch import Tensor
from torch.nn.functional import logsigmoid

from alibi_attn import ALiBiAttention, KVCache, forgetting_attention
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.kept import Kept, attend
from alibi_attn.attention.run.decoding import attend_near

LENGTH, CUTS = 320, (64, 128, 256)
CLOSED = [-math.inf, -3e38, -1e16, -1e9]


def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    query, (key, value) = torch.randn(2, 4, LENGTH, 16, dtype=dtype), torch.randn(2, 2, 2, LENGTH, 16, dtype=dtype)
    return [query, key, value, logsigmoid(torch.randn(2, 4, LENGTH) - 0.5)]


def piece_by_piece(inputs: list[torch.Tensor], **options: torch.Tensor) -> list[torch.Tensor]:
    """(output, lse) of every piece between cuts, computed separately in fp64."""
    parts = []
    for low, high in zip((0, *CUTS), (*CUTS, LENGTH), strict=True):
        part = [x[:, :, low:high].double() for x in inputs]
        part[3] = torch.cat([torch.zeros_like(part[3][..., :1]), part[3][..., 1:]], -1)
        of_part = {name: x[:, low:high] for name, x in options.items()}
        parts.append(forgetting_attention(*part, return_lse=True, backend="reference", **of_part))
    return [torch.cat(x, 2) for x in zip(*parts, strict=True)]


def with_cuts(inputs: list[torch.Tensor], closed: float) -> list[torch.Tensor]:
    gates = inputs[3].clone()
    gates[..., list(CUTS)] = closed
    return [*inputs[:3], gates]


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize(
    "options", [{}, {"segment_ids": (torch.arange(LENGTH) // 90).expand(2, -1)}], ids=["plain", "segments"]
)
def test_nothing_passes_a_cut_and_later_gates_keep_their_digits(backend: str, closed: float, options: dict) -> None:
    inputs = [x.requires_grad_() for x in with_cuts(draw(), closed)]
    exact = [x.detach().clone().requires_grad_() for x in inputs]
    found = forgetting_attention(*inputs, return_lse=True, backend=backend, **options)
    expected = piece_by_piece(exact, **options)
    weights = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, inputs, weights)
    expected_gradients = torch.autograd.grad(expected, exact, [w.double() for w in weights])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=2e-5)
    for x, y in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-4)
    assert not gradients[3][..., list(CUTS)].any()


def test_dropout_is_that_of_the_definition_where_cuts_become_segments() -> None:
    inputs = draw()
    inputs[3][0, 0, 120] = inputs[3][1, 2, 150] = -math.inf
    inputs[1][1, 1, 100] = 1e7
    found = []
    for backend in ("native", "dense"):
        torch.manual_seed(3)
        found.append(forgetting_attention(*inputs, dropout_p=0.4, backend=backend)[:, :, 150:])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_cuts_hide_what_is_large_in_compiled_calls() -> None:
    """Heads 2 and 3, which share a key head, have different cuts after a key whose score and bias pass any cut's bias."""
    inputs = draw()
    inputs[3][:, 2, 150] = inputs[3][:, 3, 120] = -math.inf
    inputs[1][:, 1, 100] = 1e8
    bias = torch.zeros(2, 4, LENGTH)
    bias[:, 2, 110] = 3e6
    weights = torch.randn(2, 4, LENGTH, 16)
    weights[:, :2] = weights[:, 2:, :150] = 0.0

    def attend(query: torch.Tensor, backend: str = "native") -> torch.Tensor:
        return forgetting_attention(query, *inputs[1:], key_bias=bias, backend=backend)

    def results(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = inputs[0].clone().requires_grad_()
        output = function(leaf)
        return output, torch.autograd.grad(output, leaf, weights)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for x, y in zip(results(compiled), results(lambda query: attend(query, "reference")), strict=True):
        torch.testing.assert_close(x[:, 2:, 150:], y[:, 2:, 150:], rtol=1e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("queries", [1, 5])
def test_decoding_stops_at_a_cut(closed: float, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi_attn.attention.run.near_keys.FEW", 32)
    monkeypatch.setattr("alibi_attn.attention.run.decoding.LONG", 0)
    near: list[Tensor] = []
    monkeypatch.setattr(
        "alibi_attn.attention.run.decoding.attend_near", lambda *x, **y: near.append(attend_near(*x, **y)) or near[-1]
    )
    query, key, value, gates = draw()
    gates[..., [100, LENGTH - 3]] = closed
    expected = forgetting_attention(query, key, value, gates, backend="reference")[:, :, -queries:]
    kept = Kept(key, value, first=LENGTH - queries, norms=lambda: Norms.of(key, value), log_fgate=gates)
    found = attend(query[:, :, -queries:], [kept], torch.zeros(4))
    assert len(near) == (queries == 1), "a cut between the queries is no bias of keys"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_caches_of_a_layer_take_gates_that_close() -> None:
    layer = ALiBiAttention(64, 4, qk_norm=True, forget_gate=True)
    x = torch.randn(1, 200, 64)
    assert layer.gate_proj is not None
    layer.gate_proj.bias.fill_(2.0)
    layer.gate_proj.register_forward_hook(lambda module, inputs, gates: gates.masked_fill(gates < -2.5, -math.inf))
    full = layer(x)
    for cache in (KVCache(), layer.reach_cache()):
        found = torch.cat([layer(part, cache=cache) for part in x.split([70, 3, *[1] * 127], 1)], 1)
        torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)
