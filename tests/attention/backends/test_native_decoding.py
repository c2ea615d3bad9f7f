"""The decoding kernel: its results equal the definition, it reads no key unnecessarily, and it keeps bad numbers."""

import math

import pytest
import torch
from attention_checks import EPS
from certificate_attack import random_attack

from alibi_attn import alibi_attention, alibi_slopes
from alibi_attn.attention.backends.native import build
from alibi_attn.attention.backends.native import decoding as native
from alibi_attn.attention.backends.native.backend import WIDTH
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run.decoding import attend_near, measured_norms

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=f"no kernels: {build.why_not()}")


def decoded(query, key, value, slopes, *, norms=None, visible=None, window=None, scale=None, tolerance=None):
    return native.decode(
        query,
        key,
        value,
        slopes,
        norms=norms,
        visible=visible,
        window=window,
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        tolerance=EPS[query.dtype] / 32 if tolerance is None else tolerance,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(4, 4, 1), (6, 2, 3), (7, 1, 16)])
def test_every_size_of_head_and_group(dtype, head_dim, heads, kv_heads, queries):
    query = torch.randn(2, heads, queries, head_dim).to(dtype)
    key, value = (torch.randn(2, kv_heads, 300, head_dim).to(dtype) for _ in range(2))
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float32)
    exact = alibi_attention(*(x.double() for x in (query, key, value)), slopes, tolerance=0.0, backend="reference")
    for norms in (None, measured_norms(key, value)):
        got = decoded(query, key, value, slopes, norms=norms)
        assert got.dtype == dtype
        off = (got.double() - exact).abs().max() / value.double().norm(dim=-1).max()
        assert off <= 2 * EPS[dtype]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_that_are_seen_are_handed_on(bad):
    slopes = torch.tensor([0.01])
    for at in (0, 1, 2):
        parts = [torch.randn(1, 1, 1, 16), torch.randn(1, 1, 200, 16), torch.randn(1, 1, 200, 16)]
        parts[at][0, 0, -1, 3] = bad
        assert decoded(*parts, slopes) is None
        assert bool(attend_near(*parts, slopes, measured_norms(*parts[1:])).isnan().all())
        hidden = decoded(*parts, slopes, visible=[(0, 199)])
        assert (hidden is None) == (at == 0)


def tiles_read(query, key, value, slopes, **options) -> torch.Tensor:
    """[H, N] bool: a tile counts as read if the output is NaN when its keys are."""
    norms = measured_norms(key, value)
    heads, tiles = query.shape[1], -(-key.shape[2] // TILE)
    group, found = heads // key.shape[1], torch.zeros(heads, tiles, dtype=torch.bool)
    for h in range(heads):
        own = slice(h // group, h // group + 1)
        of_head = Norms(norms.keys[:, own], norms.values[:, own])
        for tile in range(tiles):
            keys = key[:, own].clone()
            keys[:, :, tile * TILE : (tile + 1) * TILE] = math.nan
            of_slope = slopes[..., h : h + 1]
            found[h, tile] = (
                decoded(query[:, h : h + 1], keys, value[:, own], of_slope, norms=of_head, **options) is None
            )
    return found


def test_a_head_reads_what_is_within_its_reach_and_a_tile_of_long_keys():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1600, 16), torch.randn(1, 2, 1600, 16)
    slopes = torch.tensor([0.5, 0.05])
    read = tiles_read(query, key, value, slopes)
    assert int(read[0].sum()) <= 2
    assert 3 <= int(read[1].sum()) <= 12
    assert bool((read.diff().sum(1) == 1).all()), "the last ones, without a gap"
    key[:, :, 100] *= 100  # in tile 1
    long = tiles_read(query, key, value, slopes)
    assert bool((long.sum(1) <= read.sum(1) + 1).all())
    assert bool(long[:, 1].any())
    value[:, 1, 100] *= 1e6
    assert bool(tiles_read(query, key, value, slopes)[1, 1])


@pytest.mark.parametrize("start", range(0, 120, 40))
def test_dropped_mass_never_exceeds_the_tolerance(start):
    skipping = 0
    for seed in range(start, start + 40):
        attack = random_attack(seed)
        (query, key, value, slopes), kwargs = attack.inputs()
        wide = -query.shape[3] % WIDTH  # zeros change no score; the scale is that of the size as it was
        scale, window = kwargs.get("scale") or query.shape[3] ** -0.5, kwargs.get("window")
        query, key, value = (torch.nn.functional.pad(x.float(), (0, wide)) for x in (query[:, :, -1:], key, value))
        options = {"window": window, "scale": scale, "tolerance": attack.tolerance}
        spec = make_spec(query, key, value, slopes, **options)
        read = tiles_read(query, key, value, spec.slopes, **options).repeat_interleave(TILE, 1)[:, : key.shape[2]]
        distance = distances(1, key.shape[2], spec.query_offset, None)
        seen = visible(spec, distance).expand(1, spec.num_heads, -1, -1)[0, :, 0]
        scores = spec.scale * query.double() @ key.double().repeat_interleave(spec.group, 1).mT
        scores = scores[0, :, 0] - spec.slopes.double().reshape(-1, 1) * distance[0].abs()
        weight = scores.masked_fill(~seen, -math.inf).softmax(-1)
        assert float((weight * (seen & ~read)).sum(-1).max()) <= attack.tolerance, attack
        skipping += int((seen & ~read).any())
    assert skipping >= 4, "an attack on nothing: too few draws skip a key"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_tiles_are_those_of_the_certificate(dtype):
    key, value = (torch.randn(2, 3, 300, 32).to(dtype) for _ in range(2))
    value[0, 1, 70, 5] = math.nan
    got, expected = measured_norms(key, value), Norms.of(key, value)
    torch.testing.assert_close(got.keys, expected.keys, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.values, expected.values, rtol=1e-6, atol=0, equal_nan=True)
    assert bool((got.keys >= key[:, :, :256].double().norm(dim=-1).unflatten(2, (4, 64)).amax(-1)).all())


def test_unsupported_inputs_are_not_accepted():
    x = torch.randn(1, 2, 8, 16)
    assert native.takes(x)
    assert native.takes(x.transpose(1, 2), x.bfloat16().float())
    assert native.takes(x.bfloat16())
    assert native.takes(x.half())
    for other in (x.double(), x.mT, x.to("meta")):
        assert not native.takes(other)
    assert not native.takes(x, x.bfloat16())
    assert not torch.vmap(lambda y: torch.tensor(native.takes(y)))(x).any()
