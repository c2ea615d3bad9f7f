"""A BlockMask for FlexAttention: its blocks and mask_mod give the same attention as `alibi_attention`."""

import math

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, Case, square
from attention_checks import arguments
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from alibi_attn import alibi_attention, certified_block_mask
from alibi_attn.attention.call.bias import score_bias
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances

LONG = (
    square("many tiles", 700, slopes="steep", sink=200.0),
    square("many tiles, both sides", 700, query_len=640, slopes="steep", causal=False, right="random"),
    square("many tiles, gates", 700, slopes="zero", key_bias="gates", kv_heads=1),
)
PAIRS = (
    Case("segments of queries in another order", query_len=700, key_len=700, slopes="steep", segments="pair"),
    Case("masked at length", query_len=500, key_len=700, slopes="steep", window=300, mask="random", kv_heads=2),
)


def blocks(mask: BlockMask) -> Tensor:
    """[B, H, blocks of queries, blocks of keys] bool: the listed ones."""
    count, indices = mask.kv_num_blocks, mask.kv_indices
    listed = torch.zeros(*count.shape, indices.shape[-1] + 1, dtype=torch.bool)
    at = torch.arange(indices.shape[-1])
    listed.scatter_(-1, torch.where(at < count[..., None], indices, indices.shape[-1]).long(), True)
    return listed[..., :-1]


def union(fine: Tensor, queries: int, keys: int) -> Tensor:
    """Blocks of this many blocks of queries and keys: listed if one of those in it is."""
    n, m = fine.shape[2:]
    padded = torch.nn.functional.pad(fine, (0, -m % keys, 0, -n % queries))
    return padded.unflatten(3, (-1, keys)).unflatten(2, (-1, queries)).any(5).any(3)


def kept(mask: BlockMask) -> Tensor:
    """[B, H, T, S] bool: pairs in the listed blocks that the mask_mod does not hide."""
    (b, h, t, s), (rows, keys) = mask.shape, mask.BLOCK_SIZE
    listed = blocks(mask).repeat_interleave(rows, 2).repeat_interleave(keys, 3)[..., :t, :s]
    axes = [x.reshape([-1 if at == n else 1 for at in range(4)]) for n, x in enumerate(map(torch.arange, (b, h, t, s)))]
    return listed & mask.mask_mod(*axes)


def assert_keeps_what_matters(case: Case, block_size: int | tuple[int, int], *, steeper: float = 0.0) -> BlockMask:
    """Asserts that attention over the kept pairs equals attention; with `steeper` the mask is for steeper slopes."""
    (query, key, value, slopes), kwargs = arguments(case, torch.float64)
    mask = certified_block_mask(query, key, slopes + steeper, block_size=block_size, **kwargs)
    shape = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    assert shape == mask.BLOCK_SIZE
    assert mask.shape == (case.batch, case.heads, case.query_len, case.key_len)
    spec = make_spec(query, key, value, slopes, **kwargs)
    seen = kept(mask)
    finite = [x.nan_to_num(0.0, 0.0, 0.0).repeat_interleave(spec.group, 1) for x in (key, value)]
    bias = score_bias(spec, distances(spec.query_len, spec.key_len, spec.query_offset, None), torch.ones_like(seen))[0]
    scores = (spec.scale * query @ finite[0].mT + bias.nan_to_num(neginf=0.0)).masked_fill(~seen, -math.inf)
    blind = ~seen.any(-1, keepdim=True)
    found = (scores.masked_fill(blind, 0.0).softmax(-1) @ finite[1]).masked_fill(blind, 0.0)
    true = alibi_attention(query, key, value, slopes, tolerance=0.0, backend="reference", **kwargs)
    torch.testing.assert_close(found, true, rtol=0, atol=1e-12 * float(finite[1].abs().max().clamp(min=1.0)))
    return mask


SIZES = (64, 128, 192, (256, 128))
DRAWN = [  # every case with one size and every long one with all; the other pairs in `make test-all`
    pytest.param(case, size, id=f"{case}-{size}", marks=[pytest.mark.long] * (case not in LONG and row % 4 != column))
    for row, case in enumerate([*CASES, *KEY_BIASES, *LONG])
    for column, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("case", "block_size"), DRAWN)
def test_the_kept_pairs_are_all_that_matter(case: Case, block_size: int) -> None:
    mask = assert_keeps_what_matters(case, block_size)
    if case in LONG:
        assert int(mask.kv_num_blocks.sum()) < 0.75 * mask.kv_indices.numel()


def assert_union(case: Case, queries: int, keys: int, *, exact: bool = True, steeper: float = 0.0) -> None:
    """Asserts that blocks of another shape are those that hold a listed block of 64 × 64; `steeper` is for the larger ones."""
    (query, key, _, slopes), kwargs = arguments(case, torch.float64)
    fine = blocks(certified_block_mask(query, key, slopes, block_size=64, **kwargs))
    mask = certified_block_mask(query, key, slopes + steeper, block_size=(queries, keys), **kwargs)
    expected, listed = union(fine, queries // 64, keys // 64), blocks(mask)
    assert not bool((expected & ~listed).any())
    assert not exact or torch.equal(listed, expected)


SEVERAL = [case for case in (*CASES, *KEY_BIASES, *LONG, *PAIRS) if case.key_len > 128]


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (128, 256), (64, 128), (192, 64), (128, 128)], ids=str)
def test_a_block_is_listed_if_it_holds_a_listed_block_of_64(case: Case, shape: tuple[int, int]) -> None:
    """With query segments in any order, what lies between the keys of two blocks of queries is listed too."""
    assert_union(case, *shape, exact=case is not PAIRS[0])


def test_a_missing_block_is_detected() -> None:
    case = square("no slopes", 500, slopes="zero")
    assert_union(case, 256, 128)
    with pytest.raises(AssertionError):
        assert_union(case, 256, 128, exact=False, steeper=2.0)


def test_a_mask_for_other_slopes_is_detected() -> None:
    case = square("no slopes", 500, slopes="zero")
    assert_keeps_what_matters(case, 64)
    with pytest.raises(AssertionError):
        assert_keeps_what_matters(case, 64, steeper=0.5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "error:.*without torch.compile.*")
@pytest.mark.parametrize("block_size", [128, (256, 128)], ids=str)
def test_flex_attention_with_it_is_alibi_attention(block_size) -> None:
    """Compiled, with a user's score_mod: both directions, GQA, a window, a key mask, segments, biases."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 520, 32, generator=generator)
    k, v = torch.randn(2, 2, 2, 520, 32, generator=generator).unbind(0)
    slopes, right = torch.tensor([1.0, 0.5, 0.25, 0.125]), torch.tensor([0.5, math.inf, 0.5, 2.0])
    bias, shown = torch.randn(4, 520, generator=generator), torch.rand(3, 520, generator=generator) < 0.8
    options = {
        "causal": False,
        "right_slopes": right,
        "window": 300,
        "scale": 0.3,
        "key_mask": shown[:2],
        "segment_ids": (torch.arange(520) // 400).expand(2, -1),
        "key_bias": bias.masked_fill(~shown[2], -math.inf),
    }
    mask = certified_block_mask(q, k, slopes, block_size=block_size, **options)
    steep = right.masked_fill(right == math.inf, 0.0)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - torch.where(j > i, steep[h], slopes[h]) * (i - j).abs() + bias[h, j]

    assert int(mask.kv_num_blocks.sum()) < 0.7 * mask.kv_indices.numel()
    with torch.no_grad():
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        found = attend(q, k, v, score_mod=alibi, block_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, alibi_attention(q, k, v, slopes, **options), rtol=1e-4, atol=2e-5)
