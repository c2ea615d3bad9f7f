"""What the Triton kernels leave out of each key's gradient, against fp64; runs in the child process with the interpreter.

A query leaves out a key, or a tile, at distance d only if its share of the query's softmax is at most tolerance / (2·(d + 64)).
"""

import dataclasses
import math

import torch
from certificate_attack import random_attack
from measured_in_interpreter import visited
from torch import Tensor

from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible
from alibi_attn.attention.certificate.constants import KEY_RULE_TOKENS, SCORE_UNITS, TILE

TOLERANCE = 0.02
KINDS = (
    "aligned with the first key",
    "aligned with the first key, fp16",
    "aligned with the first key, grouped",
    "aligned block by block",
    "aligned block by block, few queries",
    "a light block",
    "a light block on both sides",
    "a light block far from the queries",
    "one key in the last tile",
)
Call = tuple[list[Tensor], dict[str, object]]


def call_of(kind: str) -> Call:
    """([query, key, value, slopes], options) of a call in which, with a limit per query alone, some key loses its gradient."""
    torch.manual_seed(0)
    options: dict[str, object] = {"tolerance": TOLERANCE}
    if "aligned" in kind:  # q_i·k_0 grows with i as the bias falls: the first key has the same share of every query
        m, length, least, queries = 1 / 8, 640, math.log(0.9 * TOLERANCE), torch.arange(640)
        if "block by block" in kind:
            m, length, least = 1 / 64, 2048, math.log(0.3 * TOLERANCE)
            queries = torch.arange(length) // TILE * TILE
        key = torch.nn.functional.normalize(torch.randn(1, 1, length, 16), dim=-1)
        key[..., 0], key[0, 0, 0] = 0.0, torch.eye(16)[0]
        query = torch.zeros(1, 2 if "grouped" in kind else 1, length, 16)
        query[..., 0] = 4.0 * (m * queries + least)
        slopes = [m] * query.shape[1]
        query = query[:, :, -48:] if "few" in kind else query
    else:  # the light block has the same share of every query; the one key in the last tile weighs as much as others
        length, light = 6 * TILE, slice(5 * TILE, 6 * TILE) if "both" in kind else slice(TILE)
        share = TOLERANCE * (0.001 if "far" in kind else 0.2)
        if "one key" in kind:
            length, light = 5 * TILE + 1, slice(0)
        query, key = 0.02 * torch.randn(2, 1, 1, length, 16)
        slopes, options["key_bias"] = [0.0], torch.zeros(1, 1, length)
        options["key_bias"][..., light] = math.log(share / TILE * (length - TILE))
        options["causal"] = "light block" in kind and "both" not in kind
    if "far" in kind:
        query, options["query_offset"] = query[:, :, : 2 * TILE], 2000
    tensors = [query, key, torch.randn(key.shape)]
    tensors = [x.half() if "fp16" in kind else x for x in tensors]
    return [*tensors, torch.tensor(slopes)], options


def left_out(call: Call) -> tuple[float, float, float]:
    """(the largest 2·(d + 64) / tolerance times a share that is left out, by the certificate, and by backward of what forward
    visited; the largest weight that a key lost, for output gradients of length 1).
    """
    (query, key, value, slopes), options = call
    spec = make_spec(query, key, value, slopes, **options)
    with torch.no_grad():
        kept = visited(spec, query, key, value)
    distance, p = _weights(spec, query, key)
    p, kept = p[0], [x[0] for x in kept]
    by_certificate = p.masked_fill(kept[0], 0.0)
    by_backward = p.masked_fill(~kept[0] | kept[2], 0.0)
    away = torch.minimum(*(_of_tiles(distance.abs(), axes, "amin") for axes in ((0, 1), (1, 0))))
    limit = spec.tolerance / (2 * (away + KEY_RULE_TOKENS))
    # The certificate leaves out keys one by one, and tiles only where they have biases.
    of_tiles = _of_keys(by_backward)
    certified = (_of_keys(by_certificate) if spec.key_bias is not None else by_certificate) / limit
    lost = (by_certificate + by_backward).sum(1).unflatten(0, (-1, spec.group)).sum(1)
    return float(certified.max()), float((of_tiles / limit).max()), float(lost.max())


def attacked(seeds: range, *, biased: bool) -> list[tuple[float, float, float, float]]:
    """`left_out` of every draw, and the nats that a score of it may be off by."""
    found = []
    for seed in seeds:
        attack = random_attack(seed, biased=biased)
        attack = dataclasses.replace(attack, length=attack.length * (4 if seed % 10 == 0 else 1))
        other = {"float64": "float16", "bfloat16": "float32"}  # the interpreter does not multiply these
        attack = dataclasses.replace(attack, dtype=other.get(attack.dtype, attack.dtype))
        call = attack.inputs()
        found.append((*left_out(call), _off(call)))
    return found


def _weights(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """(i − j [T, S]; the softmax of every query in fp64, [1, H, T, S])."""
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)[0]
    slopes = spec.slopes.double().reshape(-1, 1, 1)
    if spec.right_slopes is not None:
        slopes = torch.where(distance < 0, spec.right_slopes.double().reshape(-1, 1, 1), slopes)
    scores = spec.scale * (query.double() @ key.double().repeat_interleave(spec.group, 1).mT)
    scores = scores - (slopes * distance.abs()).nan_to_num(posinf=0.0)
    if spec.key_bias is not None:
        scores = scores + (spec.key_bias.double() - spec.key_bias.double().amax().clamp(min=-1e300))[:, :, None]
    seen = visible(spec, distances(spec.query_len, spec.key_len, spec.query_offset, None)).expand(scores.shape)
    return distance, scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()


def _of_tiles(x: Tensor, axes: tuple[int, int], how: str) -> Tensor:
    """[T, S]: for every pair the reduction of x over its TILE queries and TILE keys."""
    for axis in axes:
        size = x.shape[axis]
        index = torch.arange(size) // TILE
        index = index.reshape([-1 if at == axis else 1 for at in range(x.ndim)]).expand(x.shape)
        shape = [-(-size // TILE) if at == axis else n for at, n in enumerate(x.shape)]
        x = torch.zeros(shape, dtype=x.dtype).scatter_reduce(axis, index, x, how, include_self=False)
        x = x.repeat_interleave(TILE, axis).narrow(axis, 0, size)
    return x


def _of_keys(x: Tensor) -> Tensor:
    """[H, T, S]: for every pair the sum of x over TILE keys."""
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -size % TILE))
    return padded.unflatten(-1, (-1, TILE)).sum(-1).repeat_interleave(TILE, -1)[..., :size]


def _off(call: Call) -> float:
    """The nats that a score of this call may be off by in fp32."""
    (query, key, _, slopes), options = call
    largest = float(query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max()) / query.shape[-1] ** 0.5
    biases = float(slopes.abs().max()) * key.shape[2] * 2
    if options.get("key_bias") is not None:
        finite = options["key_bias"][options["key_bias"] > -math.inf]
        biases += float(finite.amax() - finite.amin()) if len(finite) else 0.0
    return 2.0**-24 * ((query.shape[-1] + SCORE_UNITS) * (1 + largest) + 8 * biases)
