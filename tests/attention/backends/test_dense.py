"""Decoding by `dense`, which computes its few scores directly: all options of a call, and NaN and inf."""

import dataclasses
import math

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import EPS, assert_exact, without_gradients
from attention_oracle import truth

from alibi_attn import alibi_attention, alibi_slopes
from alibi_attn.attention.operators.finite_numbers import are_moderate
from alibi_attn.attention.run import few_queries

SLOPES = torch.tensor(alibi_slopes(6), dtype=torch.float32)
FEW = [dataclasses.replace(case, query_len=min(case.query_len, 4)) for case in (*CASES, *KEY_BIASES)]
MASKS = ({}, {"window": 20}, {"key_mask": torch.arange(90).expand(2, -1) % 7 > 1})


def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, n, 8, generator=generator, dtype=dtype) for h, n in ((6, 4), (3, 90), (3, 90))]


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries_equal_the_definition(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    written, attend = [], few_queries.attend
    monkeypatch.setattr(few_queries, "attend", lambda *x: written.append(attend(*x)) or written[-1])
    monkeypatch.setattr(few_queries, "FEW_KEYS", 32)  # so that keys in half precision are several parts
    assert_exact(case, dtype, without_gradients(case, dtype, backend="dense"))
    looked_closer = case.mask == "nan" or bool(truth(case).lse.isinf().any())
    assert [x is None for x in written] == [looked_closer], "a closer look is for what is not finite"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("options", MASKS, ids=list)
def test_a_bad_number_is_seen_or_has_no_effect(options: dict, where: str, bad: float) -> None:
    query, key, value = drawn(torch.float32)
    spoiled = key if where == "key" else value
    spoiled[0, 1, 70, 3], spoiled[1, 2, 88] = bad, bad
    with torch.no_grad():
        wide = (x.double() for x in (query, key, value))
        true = alibi_attention(*wide, SLOPES, backend="reference", tolerance=0.0, **options).float()
        ours = alibi_attention(query, key, value, SLOPES, backend="dense", **options)
    assert bool((ours.isnan() == true.isnan()).all())
    fine = true.isfinite()
    torch.testing.assert_close(ours[fine], true[fine], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    good = torch.ones(3, 70, 50, dtype=dtype)
    for x in (good, good.transpose(0, 1), good[:, 3:, 5:], good[:, :, 1::3], good[:0]):
        assert are_moderate(x, good)
    for at in ((0, 0, 0), (2, 69, 49), (1, 33, 17)):
        spoiled = torch.zeros(3, 70, 50, dtype=dtype)
        spoiled[at] = bad
        for x in (spoiled, spoiled.transpose(0, 1), spoiled.mT, torch.stack([spoiled] * 3, -1)[..., 1]):
            assert not are_moderate(good, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_of_moderate_rows_do_not_overflow(dtype: torch.dtype) -> None:
    work = torch.promote_types(dtype, torch.float32)
    for largest in torch.logspace(0, math.log10(torch.finfo(dtype).max), 40, dtype=torch.float64):
        row = torch.zeros(256, dtype=dtype)
        row[100] = largest
        assert not are_moderate(row) or bool((256 * row.to(work).square()).isfinite().all())
        for head_dim in (256, 2000):
            rows = largest.to(dtype).expand(1, head_dim)
            assert not are_moderate(rows) or bool((256 * rows.to(work) @ rows.to(work).mT).isfinite().all())
    assert are_moderate(torch.full((256,), torch.finfo(dtype).max ** 0.4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "scale", "size", "hidden"),
    [(320, None, 0.4999, 0.4999), (16, 1e3, 0.49, 0.49), (16, None, 0.66, 0.4), (16, -1e3, 0.5, 0.48)],
)
def test_hidden_keys_whose_scores_overflow_have_no_effect(
    dtype: torch.dtype, head_dim: int, scale: float | None, size: float, hidden: float
) -> None:
    """Queries and the last key, which only the last query sees, are near these powers of the largest number; its value times a
    gradient overflows too.
    """
    largest = torch.finfo(dtype).max
    query = torch.randn(1, 1, 24, head_dim).sign().to(dtype) * largest**size
    key, value = torch.zeros(1, 1, 24, head_dim, dtype=dtype), torch.randn(1, 1, 24, head_dim).to(dtype)
    calm = key.clone(), value.clone()
    key[:, :, -1], value[:, :, -1] = query[:, :, 0].sign() * largest**hidden, 0.6 * largest
    results = []
    for last in ((key, value), calm):
        leaves = [x.clone().requires_grad_() for x in (query, *last)]
        output = alibi_attention(*leaves, [0.1], scale=scale, backend="dense")[:, :, :-1]
        with torch.no_grad():
            plain = alibi_attention(*leaves, [0.1], scale=scale, backend="dense")[:, :, :-1]
        (dq,) = torch.autograd.grad(output.sum(), leaves[:1])
        results.append((output, plain, dq[:, :, :-1]))
    for found, true in zip(*results, strict=True):
        torch.testing.assert_close(found, true)


def test_inputs_that_require_gradients_take_the_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "attend", None)
    query, key, value = drawn(torch.float32)
    alibi_attention(query, key, value, SLOPES, backend="dense")
    with torch.no_grad():
        alibi_attention(query, key, value, SLOPES, dropout_p=0.1, backend="dense")
        with pytest.raises(TypeError):
            alibi_attention(query, key, value, SLOPES, backend="dense")
