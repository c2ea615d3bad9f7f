"""`alibi bench trained`: train a small ALiBi model and compare the certified reach of its heads with their true reach, computed
in fp64.

The lab trains a small ALiBi model. Its queries, keys and values are captured on held-out text at 8 times its trained length. The
certified reach of every head is compared with its true reach: the distance at which the dropped mass passes the tolerance,
computed in float64.

Cost: small, about four minutes on two cores; smoke, seconds.
Expected: in steep heads a certified reach at most about a third longer than the true one; in flat heads both are the text length.
"""

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from alibi_attn import alibi_slopes
from alibi_attn.inspect import TILE, certified_bounds, default_tolerance
from alibi_lab import records
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.measure.correctness import Reference
from alibi_lab.measure.cpu import CAUSAL, OURS
from alibi_lab.measure.harness import Say, checked, number, report, timed
from alibi_lab.measure.inputs import published_slopes
from alibi_lab.measure.trained_models import attention_weights, by_head, outputs_of, small_recipe, trained

Captured = dict[str, dict[str, Tensor]]
LENGTHS = {"smoke": 256, "small": 4096}

RECIPE = small_recipe(
    "trained-reach", ("alibi",), heads=8, sizes={"smoke": (64, 88), "small": (256, 688)}, smoke_length=256
)


def trained_reach(
    out: Path, *, scale: str = "small", run: Path = Path("runs/trained-reach"), say: Say = print
) -> list[Path]:
    """Trains or resumes, captures, compares and times; saves one record per layer and returns their paths.

    The captured tensors are written to `run`/captured.safetensors.

    Args:
        scale: "smoke" or "small".
        run: folder for the training and the captured tensors.
    """
    started = datetime.datetime.now(datetime.UTC)
    length = LENGTHS.get(scale, 0)
    ((config, model, corpus),) = trained(RECIPE, run, scale, longest=length, say=say)
    layers = captured(model, corpus.valid[None, :length].long())
    tensors = {f"{layer}.{name}": x.contiguous() for layer, parts in layers.items() for name, x in parts.items()}
    save_file(tensors, run / "captured.safetensors")
    paths = []
    for layer, parts in layers.items():
        columns, times = compare(**parts), _times(**parts)
        report(f"trained-reach/{layer}", {"heads": columns, "forward_ms": times}, say)
        record = records.make(
            "certificate",
            f"trained-reach/{layer}",
            config={"scale": scale, "layer": layer, "length": length, "trained": config.train.length},
            metrics={f"{name} forward_ms": time for name, time in times.items()},
            curves={"heads": columns, "mass": attention_by_distance(parts["query"], parts["key"])},
            started=started,
        )
        paths.append(records.save(record, out))
    return paths


def captured(model: LanguageModel, tokens: Tensor) -> Captured:
    """Query, key and value, each [1, H, n, D], of every layer of the model on one text [1, n]."""
    names = {"q": "query", "k": "key", "v": "value"}
    return {
        layer: {name: by_head(part[short], model.config.num_heads) for short, name in names.items()}
        for layer, part in outputs_of(model, tokens, tuple(names)).items()
    }


def compare(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Sequence[records.Json]]:
    """Per head: slope, certified reach and true reach (largest and mean over blocks), outlier tiles, and norms of keys."""
    n = query.shape[2]
    slopes, tolerance = alibi_slopes(query.shape[1]).tolist(), default_tolerance(query, key, value)
    certificate = certified_bounds(query, key, value)
    certified = certificate.left[0].clamp(max=n)
    true = torch.stack([_true_reach(query[0, h], key[0, h], slope, tolerance) for h, slope in enumerate(slopes)])
    blocks = torch.nn.functional.pad(true, (0, -n % TILE)).unflatten(-1, (-1, TILE)).amax(-1)
    return {
        "head": list(range(len(slopes))),
        "slope": slopes,
        "certified": certified.amax(-1).tolist(),
        "certified_mean": certified.double().mean(-1).tolist(),
        "true": true.amax(-1).tolist(),
        "true_mean": blocks.double().mean(-1).tolist(),
        "pinned_tiles": (certificate.outlier_tiles[0] >= 0).sum(-1).tolist(),
        "longest_key": key[0].norm(dim=-1).amax(-1).tolist(),
        "median_key": key[0].norm(dim=-1).median(-1).values.tolist(),
    }


def attention_by_distance(query: Tensor, key: Tensor) -> dict[str, Sequence[records.Json]]:
    """Per head and distance: the share of attention on keys nearer than that, averaged over the queries, in float64."""
    num_heads, n, head_dim = query.shape[1:]
    distances = [2**power for power in range(math.ceil(math.log2(n)) + 1)]
    shares: list[float] = []
    for head, slope in enumerate(alibi_slopes(num_heads).tolist()):
        mass = torch.zeros(len(distances), dtype=torch.float64)
        for distance, weight in attention_weights(query[0, head], key[0, head], slope, head_dim**-0.5, rows=256):
            mass += torch.stack([weight.masked_fill(distance >= limit, 0).sum() for limit in distances])
        shares += (mass / n).tolist()
    return {
        "head": [head for head in range(num_heads) for _ in distances],
        "distance": distances * num_heads,
        "share": shares,
    }


def _true_reach(query: Tensor, key: Tensor, slope: float, tolerance: float) -> Tensor:
    """[n] int64: per query the smallest r such that keys at i − j ≥ r together weigh at most the tolerance, in float64."""
    # Keys 0 … j can be dropped as long as their mass is at most the tolerance; distance[:, 0] is i.
    blocks = attention_weights(query, key, slope, query.shape[-1] ** -0.5, rows=256)
    return torch.cat([distance[:, 0] - (weight.cumsum(-1) <= tolerance).sum(-1) + 1 for distance, weight in blocks])


def _times(query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Forward milliseconds of our attention and of attention without a bias; both are first compared with fp64."""
    slopes = published_slopes(query.shape[1])
    query, key, value = (x.contiguous() for x in (query, key, value))
    reference = Reference.of(query, key, value, torch.ones_like(query), slopes)
    candidates = {peer.name: checked(peer, reference, query, key, value, None, slopes) for peer in (OURS, CAUSAL)}
    return {name: number(row["forward_ms"]) for name, row in timed(candidates, repeats=7, seconds=10.0).items()}
