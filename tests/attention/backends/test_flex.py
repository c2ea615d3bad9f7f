"""FlexAttention with our BlockMask: compiled on two cases; its two functions and the mask on all cases."""

import math

import pytest
import torch
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import arguments
from attention_oracle import visible_keys
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends import flex
from alibi_attn.attention.call.bias import bias_that_matters, score_bias
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate.constants import TILE

STEEP = Case("steep", batch=1, heads=2, query_len=700, key_len=700, slopes="steep", sink=200.0)


def described(
    case: Case, dtype: torch.dtype = torch.float32, **extra: object
) -> tuple[AttentionSpec[Tensor], list[Tensor]]:
    args, kwargs = arguments(case, dtype)
    names = ("right_slopes", "query_offset", "key_mask", "segment_ids", "key_bias")
    kwargs = {**dict.fromkeys(names), **kwargs, "dropout_p": 0.0, "tolerance": None, "return_lse": False, **extra}
    return make_spec(*args, **kwargs), args[:3]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "error:.*without torch.compile.*")
@pytest.mark.parametrize(
    "names",
    [
        ("key bias, hidden keys",),
        pytest.param(("steep, long", "everything", "key bias, long, gates and slopes"), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_compiled_it_equals_the_definition(names: tuple[str, ...]) -> None:
    """Also beyond torch's limit of compiled shapes, where FlexAttention would materialize all T·S scores."""
    for name in names:
        case = next(case for case in (*CASES, *KEY_BIASES) if case.name == name)
        args, kwargs = arguments(case, torch.float32)
        spec, tensors = described(case)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            output, lse = flex.run(spec, *tensors)
            true = alibi_attention(*(x.double() for x in args), **kwargs, backend="reference")
        assert lse is None
        assert float((output - true).abs().max()) < 4e-6


@pytest.mark.parametrize("case", [*CASES, *KEY_BIASES], ids=str)
def test_its_functions_are_the_definition(case: Case) -> None:
    spec, (_query, key, value) = described(case)
    flags = flex._key_flags(spec, key, value)
    b, h, i, j = (
        x.reshape([-1 if at == axis else 1 for at in range(4)])
        for axis, x in enumerate(map(torch.arange, (case.batch, case.heads, case.query_len, case.key_len)))
    )
    seen = flex._visible(spec, flags)(b, h, i, j).expand(case.batch, case.heads, case.query_len, case.key_len)
    drawn = case.draw()
    for at in torch.cartesian_prod(*map(torch.arange, seen.shape[:2])).tolist()[:8]:
        for t in (0, case.query_len // 2, case.query_len - 1):
            assert seen[*at, t].nonzero().flatten().tolist() == visible_keys(case, drawn, *at, t)
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    bias = score_bias(spec, distance, visible(spec, distance))[0]
    origin = None if spec.key_bias is None else bias_that_matters(spec, spec.key_bias)
    ours = flex._biased(spec, flags, origin)(torch.zeros(()), b, h, i, j).expand(seen.shape)
    if origin is not None:  # each subtracts its own origin from a row
        ours, bias = (x - x.masked_fill(~seen, -math.inf).amax(-1, keepdim=True) for x in (ours, bias))
    ours, bias = (x.expand(seen.shape)[seen] for x in (ours, bias))
    torch.testing.assert_close(
        ours, bias, rtol=0.0 if origin is None else 2.0**-22, atol=0.0 if origin is None else 2.0**-15
    )


@pytest.mark.parametrize("case", [*(c for c in CASES if c.name.startswith("steep")), STEEP], ids=str)
def test_the_block_mask_holds_the_certified_tiles_and_little_else(case: Case) -> None:
    spec, tensors = described(case)
    tiles = flex.plan(spec, *tensors)
    count, indices = flex.key_blocks(spec, tiles, flex.BLOCK)
    for b, h, n in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        listed = set(indices[b, h, n, : count[b, h, n]].tolist())
        first, last, low, high = tiles.bands[b, h, n].tolist()
        outlier_tiles = [tile for tile in tiles.outlier_tiles[b, h].tolist() if low <= tile < high]
        wanted = {tile // 2 for tile in (*range(first, last), *outlier_tiles)}
        assert wanted <= listed <= wanted | {tile // 2 for tile in tiles.outlier_tiles[b, h].tolist()}
        assert sorted(indices[b, h, n].tolist()) == list(range(-(-case.key_len // flex.BLOCK)))
    if case is STEEP:
        assert int(count.sum()) < 0.6 * count.shape[2] * count.shape[1] * indices.shape[-1]
        reach, scores, *_ = flex.visits(spec, *tensors)
        assert int(scores.sum()) >= int(count.sum()) * TILE
        assert int(reach.max()) <= case.key_len


def test_refusals_name_their_reason() -> None:
    case = CASES[0]
    spec, tensors = described(case)
    assert flex.why_not(spec, *tensors) is None
    half, doubles = described(case, torch.float64)
    assert "float64" in flex.why_not(half, *doubles)
    assert "no lse on the CPU" in flex.why_not(described(case, return_lse=True)[0], *tensors)
    assert "dropout_p" not in flex.READS
    tensors[1].requires_grad_()
    assert "no backward on the CPU" in flex.why_not(spec, *tensors)
    with torch.no_grad():
        assert flex.why_not(spec, *tensors) is None
    spec.slopes.requires_grad_()
    assert "no fixed order" in flex.why_not(spec, *tensors)
