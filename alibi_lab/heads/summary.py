"""`alibi heads summary`: where the heads of a trained ALiBi model attend on one text, per layer and head.

    certified       the head's certified reach (`head_reach`): keys at that distance or beyond are never read
    carried         the share of the keys within that reach, over all queries, that weigh more than the certificate's
                    tolerance: how much of the certificate the model uses
    mean_distance   Σ_j p_ij · (i − j), the mean over the queries
    first_token     p_i0, the mean over the queries i ≥ 1. A head that gives 0.9 or more to the first token counts as
                    collapsed; 31 to 44 % of BLOOM's heads have collapsed (Schallon 2026, arXiv:2603.09616)
    zero_…          the share of the weights p_ij, j ≤ i, that round to zero in a dtype. With ALiBi the main cause is the
                    bias: in bfloat16 weights become zero beyond 92 nats (Schröder et al. 2026, arXiv:2608.03994). A
                    head is blind in a dtype if half or more of its weights are zero
    distinct_…      the distance up to which the biases of neighboring keys differ after rounding to a dtype, as in BLOOM of
                    transformers (`build_alibi_tensor`); our biases stay in fp32

p = softmax of the scaled scores with their biases, in float64, which `alibi heads weights` shows for the heads of one layer.
Cost: one forward pass and n² scores per head. Expected: steep
heads have a certified reach of a few hundred tokens and are blind in bfloat16 beyond it; flat heads are neither.
"""

import datetime
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alibi_attn import head_reach
from alibi_attn.inspect import default_tolerance
from alibi_lab import records
from alibi_lab.heads.loading import Loaded, config_of, tokens_of, weights_of

KIND = "heads"
COLLAPSED, BLIND = 0.9, 0.5  # thresholds: the share of the first token, and of zero weights
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def summary(model: Loaded, text: str, *, length: int | None = None) -> records.Record:
    """A record with a row per head of the model, on the first tokens of a text (see `tokens_of`).

    Raises:
        ValueError: a model without slopes, or a text that is too short.
    """
    started, tokens = datetime.datetime.now(datetime.UTC), tokens_of(model, text, length)
    columns: dict[str, list[records.Json]] = {}

    def see(layer: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        for name, values in measured(query, key, slopes, scale).items():
            columns.setdefault(name, []).extend(values)
        columns.setdefault("layer", []).extend([layer] * len(slopes))

    with torch.no_grad():
        model.run(tokens, see)
    about = {"length": tokens.shape[1], "collapsed_from": COLLAPSED, "blind_from": BLIND}
    return records.make(
        KIND,
        f"heads/{model.name}",
        config={**config_of(model, text), **about},
        metrics=totals(columns),
        curves={"heads": columns},
        started=started,
    )


def weights(model: Loaded, text: str, *, layer: int = 0, length: int | None = None) -> tuple[Tensor, Tensor]:
    """The weights [H, n, n] of a layer on the first tokens of a text (default: 64), row i those of query i, and the slopes [H].

    Raises:
        ValueError: a layer that the model does not have, a model without slopes, or a text that is too short.
    """
    tokens, found = tokens_of(model, text, length or 64), dict[int, tuple[Tensor, Tensor]]()

    def see(at: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        blocks = weights_of(query, key, slopes, scale)
        found[at] = torch.cat([weight for _, weight in blocks], 1), slopes

    with torch.no_grad():
        model.run(tokens, see)
    if layer not in found:
        raise ValueError(f"layer is {layer} but the model has the layers 0 to {max(found)}")
    return found[layer]


def measured(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> dict[str, list[records.Json]]:
    """The columns of one layer, a row per head; query [1, H, n, D], key [1, K, n, D], slopes [H]."""
    n = query.shape[2]
    reach, tolerance = head_reach(query, key, slopes, scale=scale)[0], default_tolerance(query, key, key)
    sums = torch.zeros(4 + len(DTYPES), len(slopes), dtype=torch.float64)
    for distance, weight in weights_of(query, key, slopes, scale):
        visible = distance >= 0
        read = visible & (distance < reach[:, None, None])
        zeros = ((weight <= half_of_the_smallest(dtype)) & visible for dtype in DTYPES)
        of_the_first = weight[:, distance[:, 0] > 0, 0]
        terms = weight * distance, of_the_first, read & (weight > tolerance), read, *zeros
        sums += torch.stack([term.flatten(1).sum(1, dtype=torch.float64) for term in terms])
    distances, first, heavy, within, *zero_counts = sums
    columns: dict[str, list[records.Json]] = {"head": list(range(len(slopes))), "slope": slopes.double().tolist()}
    columns |= {"certified": reach.tolist(), "carried": (heavy / within).tolist()}
    columns |= {"mean_distance": (distances / n).tolist(), "first_token": (first / (n - 1)).tolist()}
    for dtype, count in zip(DTYPES, zero_counts, strict=True):
        columns[f"zero_{_name(dtype)}"] = (count / (n * (n + 1) / 2)).tolist()
        columns[f"distinct_{_name(dtype)}"] = [distinct_up_to(slope, dtype, n) for slope in slopes.double().tolist()]
    return columns


def half_of_the_smallest(dtype: torch.dtype) -> float:
    """Half of the dtype's smallest subnormal. Numbers up to this round to zero (ties round to even)."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps) / 2


def distinct_up_to(slope: float, dtype: torch.dtype, length: int) -> int:
    """The first distance d at which m·d and m·(d + 1) round to the same number, or the length if there is none."""
    biases = (slope * torch.arange(length + 1, dtype=torch.float32)).to(dtype)
    same = (biases[1:] == biases[:-1]).nonzero()
    return int(same[0]) if len(same) else length


def totals(columns: Mapping[str, Sequence[records.Json]]) -> dict[str, float | None]:
    """The number of heads, of those that have collapsed onto the first token, and of those that are blind in each dtype."""

    def count(name: str, least: float) -> float:
        return float(sum(isinstance(value, float) and value >= least for value in columns[name]))

    blind = {f"blind_{_name(dtype)}": count(f"zero_{_name(dtype)}", BLIND) for dtype in DTYPES}
    return {"heads": float(len(columns["head"])), "collapsed": count("first_token", COLLAPSED), **blind}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
