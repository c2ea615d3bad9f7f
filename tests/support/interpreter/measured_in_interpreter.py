"""What backward of the Triton kernels leaves out because forward measured it; runs in the child process with the interpreter."""

import dataclasses
import math

import torch
from attention_cases import Case
from certificate_attack import keys_in_tiles, random_attack, spread
from fused_in_interpreter import call_of
from measured_attack import fused_keys, left_out_by_backward
from torch import Tensor

from alibi_attn.attention.api import alibi_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.plan import measured_tiles
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import Tiles


def visited(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, T, S] bool: the keys that forward visits, those of the query kernel, and those of the key kernel."""
    tiles = fused.plan(spec, query, key, value)
    ours = keys_in_tiles(spec, Tiles(tiles.bands, tiles.outlier_tiles, tiles.beside, tiles.weight, tiles.rows))
    if not fused.measures(spec, query):
        return ours, ours, ours
    fused.forward(spec, query, key, value, tiles)
    measured = measured_tiles(spec, tiles)
    outliers = measured.outlier_tiles[:, :, None, :, None] == torch.arange(-(-spec.key_len // TILE))
    low, high = measured.bands[..., 2:3], measured.bands[..., 3:4]
    tile = torch.arange(outliers.shape[-1])
    allowed = outliers.any(-2) & (tile >= low) & (tile < high)
    return ours, keys_in_tiles(spec, measured), keys_in_tiles(spec, measured) | spread(spec, allowed, TILE)


def gradient_over_measured_tiles(case: Case, tolerance: float) -> tuple[dict[str, float], tuple[int, int, int]]:
    """(relative errors of the gradients against fp64 sums over exactly the pairs that each kernel should visit; how many pairs
    forward visits, the query kernel, and the key kernel).
    """
    spec, query, key, value = call_of(case, tolerance=tolerance)
    seen = visible(spec, distances(spec.query_len, spec.key_len, spec.query_offset, None))
    ours, of_queries, of_keys = (x & seen for x in visited(spec, query, key, value))
    drawn = case.draw()
    do, dlse = torch.tensor(drawn["grad_output"]), torch.tensor(drawn["grad_lse"])
    blind = ~seen.expand(ours.shape).any(-1, keepdim=True)
    query, do, dlse = query.masked_fill(blind, 0.0), do.masked_fill(blind, 0.0), dlse.masked_fill(blind[..., 0], 0.0)
    q, m = query.double(), spec.slopes.double().reshape(-1, 1, 1)
    k, v = (x.double().repeat_interleave(spec.group, 1) for x in (key, value))
    distance = (torch.arange(spec.query_len)[:, None] + spec.query_offset - torch.arange(spec.key_len)).abs()
    p = (spec.scale * (q @ k.mT) - m * distance).masked_fill(~ours, -torch.inf).softmax(-1).nan_to_num()
    ds = p * (do @ v.mT - ((p @ v) * do).sum(-1, keepdim=True) + dlse[..., None])
    of_heads = {"key": spec.scale * (ds * of_keys).mT @ q, "value": (p * of_keys).mT @ do}
    true = {name: x.unflatten(1, (-1, spec.group)).sum(2) for name, x in of_heads.items()}
    true["query"] = spec.scale * (ds * of_queries) @ k
    true["slopes"] = -(ds * of_queries * distance).sum((0, 2, 3))
    tiles = fused.plan(spec, query, key, value)
    output, lse = fused.forward(spec, query, key, value, tiles)
    found = fused.backward(spec, query, key, value, output, lse, do.float(), dlse.float(), tiles, slopes_wanted=True)
    got = {"query": found[0], "key": found[1], "value": found[2], "slopes": found[3].sum((0, 1))}
    errors = {name: float((got[name] - x).abs().max() / x.abs().max()) for name, x in true.items()}
    return errors, tuple(int(x.sum()) for x in (ours, of_queries, of_keys))


def gradients_of_a_public_call(tolerance: float) -> list[tuple[Tensor, Tensor]]:
    """(the gradient of a call through autograd, and that of the kernels over the tiles that forward measured)."""
    torch.manual_seed(0)
    query, key, value, do = torch.randn(4, 1, 2, 500, 16)
    leaves = [x.requires_grad_() for x in (3.0 * query, key, value)]
    output = alibi_attention(*leaves, [0.1, 0.05], tolerance=tolerance, backend="fused")
    found = torch.autograd.grad(output, leaves, do)
    with torch.no_grad():
        spec = make_spec(*leaves, [0.1, 0.05], tolerance=tolerance)
        tiles = fused.plan(spec, *leaves)
        output, lse = fused.forward(spec, *leaves, tiles)
        expected = fused.backward(spec, *leaves, output, lse, do, None, tiles, slopes_wanted=False)
    return list(zip(found, expected[:3], strict=True))


def computed(tolerance: float, *, trains: bool = True) -> tuple[int, int]:
    """How many scores forward and backward compute, as `explain` counts them."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 700, 16, requires_grad=trains)
    peaked = 3.0 * query
    spec = make_spec(peaked, key, value, [0.1, 0.05], tolerance=tolerance)
    with torch.no_grad():
        found = fused.visits(spec, peaked, key, value)
    measured = found.scores if found.measured_scores is None else found.measured_scores
    return int(found.scores.sum()), int(measured.sum())


def attacked(seeds: range, *, biased: bool, careless: float = 1.0) -> list[tuple[float, float, float]]:
    """For every draw: (the share that backward leaves out / tolerance, the share of these keys, the rounding of scores).

    Args:
        careless: a factor of the kernels' tolerance.
    """
    found = []
    for seed in seeds:
        attack = random_attack(seed, biased=biased)
        attack = dataclasses.replace(attack, length=attack.length * (4 if seed % 10 == 0 else 1))
        lost, share, off = left_out_by_backward(attack, careless * attack.tolerance, fused_keys)
        found.append((lost / (attack.tolerance * math.exp(min(2 * off, 1.0))), share, off))
    return found


def with_a_long_value() -> tuple[Tensor, Tensor]:
    """The first tiles that backward visits without and with a value a thousand times as long as others, that no query needs."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 700, 16)
    found = []
    for factor in (1.0, 1e3):
        value[:, :, 5] *= factor
        spec = make_spec(query, key, value, [0.1, 0.02], tolerance=1e-3)
        tiles = fused.plan(spec, query, key, value)
        fused.forward(spec, query, key, value, tiles)
        found.append(tiles.measured[0, :, :11, 0].clone())
    return found[0], found[1]
