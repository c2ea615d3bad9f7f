"""`alibi heads MODEL`: where the heads of a trained ALiBi model attend on one text, per layer and head.

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

p = softmax of the scaled scores with their biases, in float64. Cost: one forward pass and n² scores per head. Expected: steep
heads have a certified reach of a few hundred tokens and are blind in bfloat16 beyond it; flat heads are neither.
"""

import dataclasses
import datetime
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_attn import head_reach
from alibi_attn.inspect import default_tolerance, encode, load_decoder, read_config, watched
from alibi_lab import records
from alibi_lab.lab.model.position_method import Pass, PositionMethod
from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer, newest
from alibi_lab.measure import rollout
from alibi_lab.measure.harness import Columns, Config, Row, append
from alibi_lab.measure.trained_models import attention_weights, by_head, outputs_of

KIND = "heads"
COLLAPSED, BLIND = 0.9, 0.5  # thresholds: the share of the first token, and of zero weights
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
See = Callable[[int, Tensor, Tensor, Tensor, float], None]  # as in `capture_qk.watched`
_ROWS = 128  # queries whose weights are computed at a time


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model whose queries and keys can be captured.

    Args:
        length: the trained length; None if unknown.
        encode: text -> tokens.
        facts: of its training, for the config of a record.
        run: runs the model on tokens [1, n] and calls a function per layer (see `capture_qk.watched`).
        accumulate: runs it on tokens [B, n] for `rollout.rolled_out`.
    """

    name: str
    length: int | None
    facts: Config
    encode: Callable[[str], Sequence[int]]
    run: Callable[[Tensor, See], None]
    accumulate: Callable[[Tensor, rollout.Rollout], None]


def model_heads(folder: Path, text: str, *, length: int | None = None, method: str | None = None) -> records.Record:
    """A record with a row per head of the model in a folder, on the first tokens of a text.

    Args:
        folder: a lab checkpoint, or a transformers folder that `patch` or `ALiBiForCausalLM` supports.
        length: tokens to read. Default: twice the trained length, or 1,024 if that is unknown, and at most the whole text.
        method: the code of a lab checkpoint's position method, `FILE.py:Class`, if it is not built in.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: a model without slopes, or a text with fewer than two tokens or fewer than `length`.
    """
    started = datetime.datetime.now(datetime.UTC)
    model = load(folder, method)
    tokens = list(model.encode(text))[: length or 2 * (model.length or 512)]
    if len(tokens) < 2 or (length and len(tokens) < length):
        raise ValueError(f"the text has {len(tokens)} tokens but {length or 2} are needed; pass a longer text")
    curves: Columns = {"heads": {}}

    def see(layer: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        for row in measured(query, key, slopes, scale):
            append(curves, "heads", {**row, "layer": layer})

    with torch.no_grad():
        model.run(torch.tensor([tokens]), see)
    config = {**_config(model, text), "length": len(tokens), "collapsed_from": COLLAPSED, "blind_from": BLIND}
    name, metrics = f"heads/{model.name}", totals(curves["heads"])
    return records.make(KIND, name, config=config, metrics=metrics, curves=curves, started=started)


def model_rollout(folder: Path, text: str, *, length: int | None = None, method: str | None = None) -> records.Record:
    """A record of the attention of a model accumulated over its layers (`rollout.py`); arguments and errors as `model_heads`.

    Any method of the lab that reads whole texts is supported. It reads the first stretches of the text, each of `length` tokens
    (default: the trained length, or 512).
    """
    model = load(folder, method)
    tokens = rollout.stretches(model.encode(text), length or model.length or 512)
    return rollout.rolled_out(model.name, _config(model, text), tokens, model.accumulate)


def load(folder: Path, method: str | None = None) -> Loaded:
    """The model in a folder, written by the lab or by transformers."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; pass a lab checkpoint or a transformers folder")
    if newest(folder) is not None or "schema" in read_config(folder):
        return _of_the_lab(folder, method)
    return _of_transformers(folder)


def measured(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> Iterator[Row]:
    """Yields a row per head of one layer; query [1, H, n, D], key [1, K, n, D], slopes [H]."""
    n = query.shape[2]
    reaches, tolerance = head_reach(query, key, slopes, scale=scale)[0].tolist(), default_tolerance(query, key, key)
    for head, (slope, reach) in enumerate(zip(slopes.double().tolist(), reaches, strict=True)):
        sums = torch.zeros(4 + len(DTYPES), dtype=torch.float64)
        own_key = key[0, head * key.shape[1] // len(slopes)]
        for distance, weight in attention_weights(query[0, head], own_key, slope, scale, rows=_ROWS):
            visible = distance >= 0
            read = visible & (distance < reach)
            zeros = ((weight <= half_of_the_smallest(dtype)) & visible for dtype in DTYPES)
            of_the_first = weight[distance[:, 0] > 0, 0]
            terms = weight * distance, of_the_first, read & (weight > tolerance), read, *zeros
            sums += torch.stack([term.sum().double() for term in terms])
        distances, first, heavy, within, *zero_counts = sums.tolist()
        row: Row = {"head": head, "slope": slope, "certified": reach, "carried": heavy / within}
        row |= {"mean_distance": distances / n, "first_token": first / (n - 1)}
        for dtype, count in zip(DTYPES, zero_counts, strict=True):
            row[f"zero_{_name(dtype)}"] = count / (n * (n + 1) / 2)
            row[f"distinct_{_name(dtype)}"] = distinct_up_to(slope, dtype, n)
        yield row


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


def _config(model: Loaded, text: str) -> Config:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"model": model.name, "trained": model.length, "text_sha256": digest, **model.facts}


def _of_the_lab(folder: Path, method: str | None) -> Loaded:
    model, config = load_checkpoint(folder, method=method)
    tokenizer = load_checkpoint_tokenizer(folder)
    kind = type(model.position)

    def run(tokens: Tensor, see: See) -> None:
        slopes: object = None
        if kind.rotate is PositionMethod.rotate and not kind.per_layer and kind.add is PositionMethod.add:
            biases = model.position.bias(Pass(tokens.shape[1], tokens.shape[1]))
            slopes = torch.zeros(config.model.num_heads) if biases is None else biases
        if not isinstance(slopes, Tensor) or slopes.ndim != 1:
            raise ValueError(
                f"the model has {config.model.method} positions, which are not slopes, but certified reach needs a linear bias; "
                "pass a model with alibi, alibi-learned, alibi-half or none"
            )
        for layer, part in enumerate(outputs_of(model, tokens, ("q", "k")).values()):
            query, key = (by_head(part[name], config.model.num_heads) for name in ("q", "k"))
            see(layer, query, key, slopes, query.shape[-1] ** -0.5)

    facts: Config = {"method": config.model.method, "seed": config.train.seed, "layers": config.model.num_layers}
    name, length = f"{config.model.method}-{config.train.length}", config.train.length
    accumulate = functools.partial(rollout.run_of_the_lab, model)
    return Loaded(name, length, facts, lambda text: tokenizer.encode(text).tolist(), run, accumulate)


def _of_transformers(folder: Path) -> Loaded:
    model, tokenizer = load_decoder(str(folder))

    def run(tokens: Tensor, see: See) -> None:
        with watched(model, see):
            model(tokens, use_cache=False)

    def accumulate(tokens: Tensor, into: rollout.Rollout) -> None:
        run(tokens, functools.partial(rollout.add_layer, into))

    return Loaded(folder.resolve().name, None, {}, lambda text: encode(tokenizer, text, model), run, accumulate)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
