"""Gates that close entirely, −inf or very negative: later results are as if nothing came before, in every digit."""

import math

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
@pytest.mark.parametrize("options", [{}, {"segment_ids": (torch.arange(LENGTH) // 90).expand(2, -1)}], ids=str)
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


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4, 1e8, 1e18])
def test_keys_before_a_cut_are_never_used(backend: str, bad: float) -> None:
    inputs = with_cuts(draw(), -math.inf)
    spoiled = [x.clone() for x in inputs]
    spoiled[1][0, 0, 100] = spoiled[2][1, 1, 30] = bad
    found, expected = ([x.requires_grad_() for x in some] for some in (spoiled, inputs))
    results = [forgetting_attention(*some, return_lse=True, backend=backend) for some in (found, expected)]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x[:, :, CUTS[1] :], y[:, :, CUTS[1] :], rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(x[:, :, CUTS[1] :].sum(), some)
        for (x, _), some in zip(results, (found, expected), strict=True)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x[:, :, CUTS[1] :], y[:, :, CUTS[1] :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize("hidden", ["key_mask", "key_bias", "segment_ids"])
def test_a_query_whose_keys_since_the_cut_are_hidden_sees_nothing(backend: str, hidden: str) -> None:
    inputs = [x.requires_grad_() for x in with_cuts(draw(), -math.inf)]
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[:, 64:80] = seen[1, 256:] = False
    blind = ~seen
    options: dict = {"key_mask": seen}
    if hidden == "key_bias":
        options = {"key_bias": torch.zeros(2, 1, LENGTH).masked_fill(~seen[:, None], -math.inf)}
    if hidden == "segment_ids":
        options = {"segment_ids": (torch.where(seen, 0, 1), torch.where(seen, 0, 2))}
        options["segment_ids"][0][:] = 0
    output, lse = forgetting_attention(*inputs, return_lse=True, backend=backend, **options)
    assert not output.transpose(1, 2)[blind].any()
    assert (lse.transpose(1, 2)[blind] == -math.inf).all()
    assert lse.transpose(1, 2)[seen].isfinite().all()
    gradients = torch.autograd.grad(output.transpose(1, 2)[blind].sum(), inputs)
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("backend", WITH_KEY_BIAS)
@pytest.mark.parametrize("hidden", ["nothing", "window", "segments"])
@pytest.mark.parametrize("large", ["key", "key_bias", "slopes", "NaN"])
def test_cuts_of_single_heads_hide_what_is_large(backend: str, large: str, hidden: str) -> None:
    """Against the definition, in fp64; heads of one key head have different cuts."""
    options: dict = {
        "window": {"window": 100},
        "segments": {"segment_ids": (torch.arange(LENGTH) // 90).expand(2, -1)},
    }.get(hidden, {})
    inputs = draw(torch.float64)
    inputs[3] = inputs[3].double()
    inputs[3][0, 0, 120] = inputs[3][0, 1, 200] = inputs[3][1, 2, [150, 300]] = -math.inf
    slopes, bias = (
        torch.tensor([0.1, 0.0, 0.5, 0.2], dtype=torch.float64),
        torch.zeros(2, 4, LENGTH, dtype=torch.float64),
    )
    if large == "key_bias":
        bias[:, 2, 110] = 2e6
    elif large == "slopes":
        slopes[2] = -1e5
    else:
        inputs[1][1, 1, 100] = inputs[2][1, 1, 100] = 1e6 if large == "key" else math.nan
    found = []
    for name in (backend, "reference"):
        leaves = [x.clone().requires_grad_() for x in (*inputs, slopes, bias)]
        output, lse = forgetting_attention(
            *leaves[:5], key_bias=leaves[5], return_lse=True, backend=name, tolerance=0.0, **options
        )
        kept = [x[1, 2, 150:] for x in (output, lse)]
        gradients = list(torch.autograd.grad(kept, leaves, [x.detach().cos() for x in kept]))
        if large == "NaN":  # head 3 sees it everywhere, so its output and gradients are NaN
            gradients = [gradients[0][1, 2, 151:], gradients[3][1, 2, 151:]]
        found.append([output.nan_to_num(7.0), lse.nan_to_num(7.0), *gradients])
    assert found[0][0][1, 2, 150:].abs().max() < 10
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * max(1.0, float(y.detach().abs().max())))


def test_dropout_is_that_of_the_definition_where_cuts_become_segments() -> None:
    inputs = draw()
    inputs[3][0, 0, 120] = inputs[3][1, 2, 150] = -math.inf
    inputs[1][1, 1, 100] = 1e7
    found = []
    for backend in ("native", "dense"):
        torch.manual_seed(3)
        found.append(forgetting_attention(*inputs, dropout_p=0.4, backend=backend)[:, :, 150:])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "native"])
def test_cuts_compile(backend: str) -> None:
    inputs = with_cuts(draw(), -math.inf)
    inputs[1][0, 0, 30] = math.nan
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[:, 64:80] = False

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return forgetting_attention(*x, key_mask=seen, backend=backend)

    found = torch.compile(attend, fullgraph=True, backend="eager")(*inputs)
    torch.testing.assert_close(found, attend(*inputs), rtol=1e-5, atol=1e-5, equal_nan=True)


def stretch_by_stretch(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) in fp64 without any sum over a cut: the gates after a cut are summed from it on."""
    query, key, value, gates = inputs
    cut = gates == -math.inf
    position = torch.arange(gates.shape[-1])
    start = torch.where(cut, position, 0).cummax(-1).values
    between = (position > position[:, None]) & (position <= position[:, None, None])  # [i, j, l]
    bias = torch.where(between, gates.masked_fill(cut, 0.0)[:, :, None, None], 0.0)
    hidden = (position > position[:, None]) | (position < start[..., None])
    bias = torch.where(position[None] >= start[..., None, None], bias, 0.0).sum(-1)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5 + bias).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("backend", ["reference", "dense", "native"])
@pytest.mark.parametrize("per_head", [False, True])
def test_cuts_cost_no_digits(backend: str, per_head: bool) -> None:
    length = 150
    query = torch.randn(1, 4, length, 16, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, length, 16, dtype=torch.float64)
    gates = -0.2 * torch.rand(1, 4, length, dtype=torch.float64)
    for head in range(4):
        gates[:, head, 3 + per_head * head : 80 : 7] = -math.inf
    found = []
    for attention in (
        stretch_by_stretch,
        lambda x: forgetting_attention(*x, return_lse=True, tolerance=0.0, backend=backend),
    ):
        leaves = [x.clone().requires_grad_() for x in (query, key, value, gates)]
        results = attention(leaves)
        gradients = torch.autograd.grad(results, leaves, [x.detach().cos() for x in results])
        found.append([*results, *gradients])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("transform", ["vmap", "vjp", "compile"])
def test_cuts_hide_what_is_large_in_transforms(transform: str) -> None:
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

    def gradient(query: torch.Tensor, function) -> torch.Tensor:
        leaf = query.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, weights)[0]

    expected = attend(inputs[0], "reference"), gradient(inputs[0], lambda x: attend(x, "reference"))
    if transform == "compile":
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        found = compiled(inputs[0]), gradient(inputs[0], compiled)
    else:

        def both(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output, pull = torch.func.vjp(attend, query)
            return output, pull(weights)[0]

        if transform == "vmap":
            found = [x[0] for x in torch.func.vmap(both)(inputs[0][None])]
        else:
            found = both(inputs[0])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[:, 2:, 150:], y[:, 2:, 150:], rtol=1e-5, atol=2e-5)


def test_a_sum_that_absorbs_later_gates_is_noticed() -> None:
    inputs = with_cuts(draw(), -1e16)
    sums = inputs[3].double().cumsum(-1)
    scores = inputs[0].double() @ inputs[1].double().repeat_interleave(2, 1).mT / 4
    scores = scores + (sums[..., None] - sums[:, :, None])
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = scores.masked_fill(hidden, -math.inf).softmax(-1) @ inputs[2].double().repeat_interleave(2, 1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(output, piece_by_piece(inputs)[0], rtol=1e-5, atol=2e-5)


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
