"""Every peer computes the definition of ALiBi (or of causal attention) and uses none of our attention code."""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from alibi_lab.measure import decoding
from alibi_lab.measure import peers as folder
from alibi_lab.measure.attention import PEERS
from alibi_lab.measure.inputs import KINDS, Case, Inputs
from alibi_lab.measure.inputs import draw as inputs_of
from alibi_lab.measure.peers import Attention, Peer, sdpa, sdpa_dense_bias
from alibi_lab.measure.peers.flex import flex
from alibi_lab.measure.peers.ours import ours
from alibi_lab.measure.peers.sdpa_dense_bias import dense_bias, with_mask
from alibi_lab.measure.truth import Truth, results_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SHAPE = (2, 12, 70, 16)
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
THEIRS = {peer.name: peer for peers in PEERS.values() for peer in peers}
THEIRS["FlexAttention"] = dataclasses.replace(
    THEIRS["FlexAttention"], prepare=functools.partial(flex, compiled=False), longest_backward=0
)


def definition(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi in float64, one query at a time."""
    rows = []
    for t in range(query.shape[2]):
        i = key.shape[2] - query.shape[2] + t
        distance = torch.tensor([float(i - j) for j in range(i + 1)], dtype=torch.float64)
        scores = torch.einsum("bhd,bhsd->bhs", query[:, :, t], key[:, :, : i + 1]) / query.shape[-1] ** 0.5
        weights = torch.softmax(scores - slopes[:, None] * distance, -1)
        rows.append(torch.einsum("bhs,bhsd->bhd", weights, value[:, :, : i + 1]))
    return torch.stack(rows, 2)


def draw(dtype: torch.dtype, *, queries: int = 0) -> Inputs:
    return inputs_of(Case("noise", SHAPE[2], SHAPE[0], SHAPE[1], SHAPE[3], queries, dtype))


def computed(attention: Attention, x: Inputs) -> list[Tensor]:
    return results_of(attention, [x.query, x.key, x.value], x.grad)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("peer", [p for p in THEIRS.values() if "cuDNN" not in p.name], ids=lambda peer: peer.name)
def test_a_peer_computes_the_definition_forward_and_backward(peer: Peer, dtype: torch.dtype) -> None:
    x = draw(dtype)
    query, key, value, grad, slopes = x.query, x.key, x.value, x.grad, x.slopes
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    true = definition(*leaves, slopes.double() * peer.biased)
    expected = [true, *torch.autograd.grad(true, leaves, grad.double())]
    attention = peer.prepare(x)
    trains = peer.name != "FlexAttention"  # which has no backward on a CPU
    given = [x.clone().requires_grad_(trains) for x in (query, key, value)]
    output = attention(*given)
    assert output.dtype == dtype
    outputs = [output, *(torch.autograd.grad(output, given, grad) if trains else ())]
    # A few roundings, plus four times the error of a weight from torch's exponential and the rank-2 trick's scores.
    allowed = 8 * EPS[dtype] + 4 * (2.0**-20 + 2 * peer.score_error * SHAPE[2] * float(slopes.max()))
    for found, exact in zip(outputs, expected, strict=False):
        assert float((found - exact).detach().abs().max()) < allowed * float(exact.detach().abs().max())


@pytest.mark.parametrize("peer", decoding._peers("auto"), ids=lambda peer: peer.name)
def test_one_query_sees_all_keys(peer: Peer) -> None:
    x = draw(torch.float32, queries=1)
    true = definition(*(x.double() for x in (x.query, x.key, x.value)), x.slopes.double() * peer.biased)
    with torch.no_grad():
        output = peer.prepare(x)(x.query, x.key, x.value)
    assert float((output - true).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("trained", "gates-12-U-16")])
def test_the_truth_of_every_kind_accepts_our_call_and_a_dense_bias_and_no_other(kind: str) -> None:
    x = inputs_of(Case(kind, 150, 2, 4, 16))
    truth, leaves = Truth.of(x), [x.query, x.key, x.value]
    unbiased = Truth.of(x, biased=False)
    gated = x.log_fgate is not None
    mine = Peer("ours", ours("auto"), gated=gated)
    given = [*leaves, x.log_fgate] if gated else leaves
    assert truth.compare(mine, results_of(mine.prepare(x), given, x.grad)).wrong is None
    without = sdpa.PEER if x.causal else sdpa.MASKED if x.points is None else sdpa.PLAIN
    assert unbiased.compare(without, results_of(without.prepare(x), leaves, x.grad)).wrong is None
    dense = sdpa_dense_bias.PEER
    assert truth.compare(dense, results_of(dense.prepare(x), leaves, x.grad)).wrong is None
    if kind != "gates-12-U-8":  # whose gates forget nothing
        assert truth.compare(dense, results_of(without.prepare(x), leaves, x.grad)).wrong


def assert_no_peer_is_ours(sources: dict[str, str]) -> None:
    """Files of peers import nothing of this package but slopes and other files of `measure`; ours begin with "ours"."""
    for name, source in sources.items():
        for imported in _imported(source) if not name.startswith("ours") else ():
            own = imported.startswith("alibi_attn.")
            in_jax = name == "dot_product_attention.py" and imported == "alibi_attn.jax.alibi_attention"
            assert not own or in_jax or imported == "alibi_attn.alibi_slopes", f"{name}: {imported}"
            assert not imported.startswith("alibi_lab.measure.peers.ours"), f"{name}: {imported}"


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_peer_uses_our_attention_code() -> None:
    files = sorted(Path(folder.__path__[0]).glob("*.py"))
    sources = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert len(sources) > 10
    assert_no_peer_is_ours(sources)
    for line in (
        "from alibi_attn.attention.api import alibi_attention",
        "from alibi_lab.measure.peers.ours import ours",
        "import alibi_attn.hf",
    ):
        with pytest.raises(AssertionError, match="made_up"):
            assert_no_peer_is_ours({"made_up.py": line})


def test_flex_attention_is_compiled_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, object]] = []

    def compile_(function: object, **options: object) -> object:
        if function is flex_attention:
            compiled.append(options)
            return function
        return compile_for_real(function, **options)

    compile_for_real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    x = draw(torch.float32)
    attention = flex(x)
    for _ in range(2):
        assert attention(x.query, x.key, x.value).shape == x.query.shape
    assert compiled == [{"dynamic": False}]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_wrong_results_are_distinguished_from_rounding(dtype: torch.dtype) -> None:
    """Slopes off by one head, a mask off by one key, and a missing bias, in every head or in the flattest one."""
    x = draw(dtype)
    references = {biased: Truth.of(x, biased=biased) for biased in (True, False)}
    dense, causal = THEIRS["SDPA + dense bias"], THEIRS["causal, no bias"]

    def compared(peer: Peer, attention: Attention) -> str | None:
        return references[peer.biased].compare(peer, computed(attention, x)).wrong

    biased, bias = with_mask, dense_bias(x)
    assert compared(dense, biased(bias)) is None
    assert compared(causal, causal.prepare(x)) is None
    wrong = {
        "slopes": biased(bias.roll(1, 1)),
        "mask": biased(bias.roll(1, 3)),
        "none": causal.prepare(x),
        "NaN": biased(bias * torch.nan),
    }
    for what, attention in wrong.items():
        assert compared(dense, attention), what
    assert compared(causal, biased(bias))
    flattest = bias.clone()
    flattest[:, 5] = flattest[:, 5].masked_fill(flattest[:, 5] > -torch.inf, 0.0)  # m = 2⁻⁴ loses its bias
    assert compared(dense, biased(flattest))

    def backward_of_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        right = dense.prepare(x)(q, k, v)
        other = biased(bias.roll(1, 1))(q, k, v)
        return right.detach() + other - other.detach()

    assert "gradient" in str(compared(dense, backward_of_another))


def test_a_bias_in_half_precision_is_inexact_and_its_error_is_known() -> None:
    x = draw(torch.bfloat16)
    reference = Truth.of(x)
    peer = THEIRS["SDPA + dense bias"]
    errors = reference.compare(peer, computed(peer.prepare(x), x))
    assert errors.wrong is None
    assert 2.0**-12 < errors.output < 2.0**-5
    assert errors.gradient > 2.0**-12


def test_the_last_rows_of_a_call_equal_those_of_the_last_queries_alone() -> None:
    x = inputs_of(Case("noise", 150, 1, 4, 16))
    reference = Truth.of(x)
    leaves = [each.double().requires_grad_() for each in (x.query, x.key, x.value)]
    true = definition(*leaves, x.slopes.double())
    whole = [true, *torch.autograd.grad(true, leaves, x.grad.double())]
    for rows, exact in zip(reference.rows, whole, strict=True):
        assert torch.allclose(rows, exact[:, :, -64:], rtol=0, atol=1e-12)


def test_the_rank_two_trick_may_be_off_by_fp32_rounding_but_no_more() -> None:
    x = draw(torch.float32)
    reference = Truth.of(x)
    trick = THEIRS["rank-2 trick"]
    outputs = computed(trick.prepare(x), x)
    assert reference.compare(trick, outputs).wrong is None
    off = [each + 1e-3 * each.abs().max() for each in outputs]
    assert "is wrong" in str(reference.compare(trick, off).wrong)
    exact = dataclasses.replace(trick, score_error=0.0)
    far = [each + 2e-5 * each.abs().max() for each in outputs]
    assert "is wrong" in str(reference.compare(exact, far).wrong)
