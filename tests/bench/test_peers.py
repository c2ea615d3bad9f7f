"""Every peer is what its name says: it computes the definition, and nothing of ours is in it."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from alibi_attn.bench import peers as module
from alibi_attn.bench.exactness import Reference, computed
from alibi_attn.bench.peers import Peer, cpu_peers, decoding_peers, gpu_peers
from alibi_attn.slopes import alibi_slopes

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SHAPE = (2, 12, 70, 16)
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
THEIRS = {
    peer.name: peer for peer in (*cpu_peers(), *gpu_peers(compiled=False), *decoding_peers()) if not peer.is_ours
}  # what is listed twice is the same function; of FlexAttention the one that is not compiled


def definition(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """In float64, a query at a time."""
    rows = []
    for t in range(query.shape[2]):
        i = key.shape[2] - query.shape[2] + t
        distance = torch.tensor([float(i - j) for j in range(i + 1)], dtype=torch.float64)
        scores = torch.einsum("bhd,bhsd->bhs", query[:, :, t], key[:, :, : i + 1]) / query.shape[-1] ** 0.5
        weights = torch.softmax(scores - slopes[:, None] * distance, -1)
        rows.append(torch.einsum("bhs,bhsd->bhd", weights, value[:, :, : i + 1]))
    return torch.stack(rows, 2)


def draw(dtype: torch.dtype, *, queries: int = SHAPE[2]) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(4))
    slopes = torch.tensor(alibi_slopes(SHAPE[1]), dtype=torch.float32)
    return [query[:, :, -queries:], key, value, grad[:, :, -queries:]], slopes


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("peer", [p for p in THEIRS.values() if "cuDNN" not in p.name], ids=lambda peer: peer.name)
def test_a_peer_computes_the_definition_forward_and_backward(peer: Peer, dtype: torch.dtype) -> None:
    (query, key, value, grad), slopes = draw(dtype)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    true = definition(*leaves, slopes.double() * peer.biased)
    expected = [true, *torch.autograd.grad(true, leaves, grad.double())]
    attention = peer.prepare(query, key, value, slopes)
    trains = peer.name != "FlexAttention"  # which has no backward on a CPU
    given = [x.clone().requires_grad_(trains) for x in (query, key, value)]
    output = attention(*given)
    assert output.dtype == dtype
    found = [output, *(torch.autograd.grad(output, given, grad) if trains else ())]
    # A few roundings, and four weights that torch's exponential and the scores of the rank-2 trick may be off by.
    allowed = 8 * EPS[dtype] + 4 * (2.0**-20 + 2 * peer.score_error * SHAPE[2] * float(slopes.max()))
    for ours, exact in zip(found, expected, strict=False):
        assert float((ours - exact).detach().abs().max()) < allowed * float(exact.detach().abs().max())


@pytest.mark.parametrize("peer", decoding_peers(), ids=lambda peer: peer.name)
def test_one_query_sees_all_keys(peer: Peer) -> None:
    (query, key, value, _), slopes = draw(torch.float32, queries=1)
    true = definition(*(x.double() for x in (query, key, value)), slopes.double() * peer.biased)
    found = peer.prepare(query, key, value, slopes)(query, key, value)
    assert float((found - true).abs().max()) < 1e-6


def test_no_peer_is_one_of_our_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(*_: object, **__: object) -> None:
        raise AssertionError("it is ours")

    for name in ("alibi_attention", "attend_near", "reads_near"):
        monkeypatch.setattr(module, name, ours)
    (query, key, value, _), slopes = draw(torch.float32)
    for peer in THEIRS.values():
        if "cuDNN" not in peer.name:
            peer.prepare(query, key, value, slopes)(query, key, value)
    with pytest.raises(AssertionError, match="it is ours"):
        cpu_peers()[0].prepare(query, key, value, slopes)(query, key, value)


def test_flex_attention_that_is_compiled_is_prepared_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, object]] = []

    def compile_(function: object, **options: object) -> object:
        if function is flex_attention:
            compiled.append(options)
            return function
        return compile_for_real(function, **options)

    compile_for_real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    (query, key, value, _), slopes = draw(torch.float32)
    attention = module.flex(query, key, value, slopes)
    for _ in range(2):
        assert attention(query, key, value).shape == query.shape
    assert compiled == [{"dynamic": False}]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_what_is_wrong_is_told_from_what_is_rounded(dtype: torch.dtype) -> None:
    """A slope off by one head, a mask off by one key, and a bias that is missing, in every head or in the flattest."""
    (query, key, value, grad), slopes = draw(dtype)
    reference = Reference.of(query, key, value, grad, slopes)
    dense, causal = THEIRS["SDPA + dense bias"], THEIRS["causal, no bias"]

    def compared(peer: Peer, attention: module.Attention) -> str | None:
        return reference.compare(peer, computed(attention, query, key, value, grad)).wrong

    def biased(bias: Tensor) -> module.Attention:
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    bias = module.dense_bias(query, key, slopes)
    assert compared(dense, biased(bias)) is None
    assert compared(causal, causal.prepare(query, key, value, slopes)) is None
    wrong = {
        "slopes": biased(bias.roll(1, 1)),
        "mask": biased(bias.roll(1, 3)),
        "none": causal.prepare(query, key, value, slopes),
        "NaN": biased(bias * torch.nan),
    }
    for what, attention in wrong.items():
        assert compared(dense, attention), what
    assert compared(causal, biased(bias))
    flattest = bias.clone()
    flattest[:, 5] = flattest[:, 5].masked_fill(flattest[:, 5] > -torch.inf, 0.0)  # m = 2⁻⁴ loses its bias
    assert compared(dense, biased(flattest))

    def backward_of_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        right = dense.prepare(query, key, value, slopes)(q, k, v)
        other = biased(bias.roll(1, 1))(q, k, v)
        return right.detach() + other - other.detach()

    assert "gradient" in str(compared(dense, backward_of_another))


def test_a_bias_in_half_precision_is_inexact_and_its_error_is_known() -> None:
    (query, key, value, grad), slopes = draw(torch.bfloat16)
    reference = Reference.of(query, key, value, grad, slopes)
    peer = THEIRS["SDPA + dense bias"]
    errors = reference.compare(peer, computed(peer.prepare(query, key, value, slopes), query, key, value, grad))
    assert errors.wrong is None
    assert 2.0**-12 < errors.output < 2.0**-5
    assert errors.gradient > 2.0**-12


def test_the_last_rows_of_a_long_call_are_those_of_the_last_queries_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 4, 150, 16, generator=generator) for _ in range(4))
    slopes = torch.tensor(alibi_slopes(4), dtype=torch.float32)
    reference = Reference.of(query, key, value, grad, slopes)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    true = definition(*leaves, slopes.double())
    whole = [true, *torch.autograd.grad(true, leaves, grad.double())]
    for rows, exact in zip(reference.rows[True], whole, strict=True):
        assert torch.allclose(rows, exact[:, :, -64:], rtol=0, atol=1e-12)


def test_the_trick_may_be_off_by_what_fp32_sums_explain_and_not_more() -> None:
    (query, key, value, grad), slopes = draw(torch.float32)
    reference = Reference.of(query, key, value, grad, slopes)
    trick = THEIRS["rank-2 trick"]
    found = computed(trick.prepare(query, key, value, slopes), query, key, value, grad)
    assert reference.compare(trick, found).wrong is None
    off = [x + 1e-3 * x.abs().max() for x in found]
    assert "is wrong" in str(reference.compare(trick, off).wrong)
    exact = dataclasses.replace(trick, score_error=0.0)
    far = [x + 2e-5 * x.abs().max() for x in found]
    assert "is wrong" in str(reference.compare(exact, far).wrong)
