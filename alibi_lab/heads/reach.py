"""`alibi heads reach`: the certified reach of every head compared with the true one: where the dropped mass passes the tolerance.

Expected: in steep heads a certified reach at most about a third longer than the true one; in flat heads both are the text length.
"""

import datetime
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alibi_attn.inspect import TILE, certified_bounds, default_tolerance
from alibi_lab import records
from alibi_lab.heads.loading import Loaded, config_of, tokens_of, weights_of

Columns = Mapping[str, Sequence[records.Json]]


def reach(model: Loaded, text: str, *, length: int | None = None) -> list[records.Record]:
    """A record per layer, on the first tokens of a text (see `tokens_of`). Cost: n² scores per head in fp64.

    Raises:
        ValueError: a model without slopes, or a text that is too short.
    """
    started, tokens, found = datetime.datetime.now(datetime.UTC), tokens_of(model, text, length), list[records.Record]()

    def see(layer: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        name = f"trained-reach/{model.name}/layer-{layer}"
        config = {**config_of(model, text), "layer": f"layer-{layer}", "length": tokens.shape[1]}
        curves = {
            "heads": compare(query, key, slopes, scale),
            "mass": attention_by_distance(query, key, slopes, scale),
        }
        found.append(records.make("certificate", name, config=config, metrics={}, curves=curves, started=started))

    with torch.no_grad():
        model.run(tokens, see)
    return found


def compare(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> Columns:
    """Per head: slope, certified reach and true reach (largest and mean over blocks), outlier tiles, and norms of keys.

    The true reach of a query is the smallest r such that keys at i − j ≥ r together weigh at most the tolerance, in float64.
    """
    n = query.shape[2]
    tolerance, certificate = default_tolerance(query, key, key), certified_bounds(query, key, key, slopes, scale=scale)
    certified = certificate.left[0].clamp(max=n)
    # Keys 0 … j can be dropped as long as their mass is at most the tolerance; distance[:, 0] is i.
    dropped = [(at[:, 0], (x.cumsum(-1) <= tolerance).sum(-1)) for at, x in weights_of(query, key, slopes, scale)]
    true = torch.cat([i - count + 1 for i, count in dropped], -1)  # [H, n]
    blocks = torch.nn.functional.pad(true, (0, -n % TILE)).unflatten(-1, (-1, TILE)).amax(-1)
    return {
        "head": list(range(len(slopes))),
        "slope": slopes.tolist(),
        "certified": certified.amax(-1).tolist(),
        "certified_mean": certified.double().mean(-1).tolist(),
        "true": true.amax(-1).tolist(),
        "true_mean": blocks.double().mean(-1).tolist(),
        "pinned_tiles": (certificate.outlier_tiles[0] >= 0).sum(-1).tolist(),
        "longest_key": key[0].norm(dim=-1).amax(-1).tolist(),
        "median_key": key[0].norm(dim=-1).median(-1).values.tolist(),
    }


def attention_by_distance(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> Columns:
    """Per head and distance: the share of attention on keys nearer than that, averaged over the queries, in float64."""
    num_heads, n = query.shape[1:3]
    distances = [2**power for power in range(math.ceil(math.log2(n)) + 1)]
    mass = torch.zeros(num_heads, len(distances), dtype=torch.float64)
    for distance, weight in weights_of(query, key, slopes, scale):
        mass += torch.stack([weight.masked_fill(distance >= limit, 0).sum((1, 2)) for limit in distances], -1)
    return {
        "head": [head for head in range(num_heads) for _ in distances],
        "distance": distances * num_heads,
        "share": (mass / n).flatten().tolist(),
    }
