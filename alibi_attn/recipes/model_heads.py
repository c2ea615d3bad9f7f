"""Where do the heads of a trained model look? For every layer and head of a model with ALiBi, on one text.

    certified       how far the head is certified to look (`head_reach`): keys at that distance or farther are never read
    mean_distance   Σ_j p_ij · (i − j), the mean over the queries
    first_token     p_i0, the mean over the queries i ≥ 1. A head that gives nearly all to the first token has collapsed: in
                    BLOOM 31 to 44 % of the heads do (Schallon 2026, arXiv:2603.09616). Here "nearly all" is 0.9 or more
    zero_…          the share of the weights p_ij, j ≤ i, that are zero once they are rounded to a dtype. With ALiBi that is
                    mostly the bias: in bfloat16 it happens beyond 92 nats (Schröder et al. 2026, arXiv:2608.03994). A head
                    is blind in a dtype where half of its weights or more are zero
    distinct_…      the distance up to which the biases of neighboring keys differ once they are rounded to a dtype, as BLOOM
                    in transformers rounds them (`build_alibi_tensor`); ours stay in fp32

p = softmax of the scaled scores with their biases, in float64. Command: `alibi heads MODEL --text FILE`. Cost: one forward pass
and n² scores a
head. Expected: steep heads certified to a few hundred tokens and blind in bfloat16 beyond them, flat ones neither.
"""

import contextlib
import dataclasses
import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from alibi_attn import records
from alibi_attn.attention.api import head_reach
from alibi_attn.hf.causal_lm import loading
from alibi_attn.hf.causal_lm.model import ALiBiForCausalLM
from alibi_attn.hf.checkpoints import read_config
from alibi_attn.hf.patching import patch
from alibi_attn.hf.watching import watched
from alibi_attn.lab.checkpoint import load_checkpoint, load_checkpoint_tokenizer, newest
from alibi_attn.lab.hooks import Pass, PositionMethod
from alibi_attn.lab.model import Block, LanguageModel

KIND = "heads"
COLLAPSED, BLIND = 0.9, 0.5  # from which share of the first token, and of weights that are zero, a head is called so
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
See = Callable[[int, Tensor, Tensor, Tensor, float], None]  # as in `watching.watched`
_ROWS = 128  # queries whose weights exist at one time

Columns = dict[str, list[records.Json]]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that can be looked into.

    Args:
        length: tokens it was trained on at a time; None where nobody says.
        encode: text -> tokens.
        run: tokens [1, n] and what to call for each layer (see `watching.watched`).
    """

    name: str
    length: int | None
    encode: Callable[[str], Sequence[int]]
    run: Callable[[Tensor, See], None]


def model_heads(folder: Path, text: str, *, length: int | None = None) -> records.Record:
    """A record of every head of the model in a folder, on the first tokens of a text.

    Args:
        folder: a checkpoint of the lab, or a folder of transformers that `patch` or `ALiBiForCausalLM` takes.
        length: tokens; by default twice the trained length where that is known, else 1,024, and no more than the text has.

    Raises:
        ValueError: no such model, one without slopes, or a text of fewer than two tokens.
    """
    started = datetime.datetime.now(datetime.UTC)
    model = load(folder)
    tokens = list(model.encode(text))[: length or 2 * (model.length or 512)]
    if len(tokens) < 2 or (length and len(tokens) < length):
        raise ValueError(f"the text has {len(tokens)} tokens but {length or 2} are asked for; pass a longer text")
    columns: Columns = {}

    def see(layer: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        for name, values in measured(query, key, slopes, scale).items():
            columns.setdefault(name, []).extend(values)
        columns.setdefault("layer", []).extend([layer] * query.shape[1])

    with torch.no_grad():
        model.run(torch.tensor([tokens]), see)
    config: dict[str, records.Json] = {
        "model": model.name,
        "length": len(tokens),
        "trained": model.length,
        "collapsed_from": COLLAPSED,
        "blind_from": BLIND,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return records.make(
        KIND, f"heads/{model.name}", config=config, metrics=totals(columns), curves={"heads": columns}, started=started
    )


def load(folder: Path) -> Loaded:
    """The model in a folder, of the lab or of transformers."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; pass a checkpoint of the lab or a folder of transformers")
    if newest(folder) is not None or "schema" in read_config(folder):
        return _of_the_lab(folder)
    return _of_transformers(folder)


def measured(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> Columns:
    """The columns of one layer, a value a head; query [1, H, n, D], key [1, K, n, D], slopes [H]."""
    heads, n = query.shape[1], query.shape[2]
    reach = head_reach(query, key, slopes, scale=scale)[0]
    q, k = query[0].double(), key[0].double().repeat_interleave(heads // key.shape[1], dim=0)
    m, places = slopes.double()[:, None, None], torch.arange(n, device=query.device)
    distance_sum, first_sum = q.new_zeros(2, heads)
    zeros = {dtype: q.new_zeros(heads) for dtype in DTYPES}
    for start in range(0, n, _ROWS):
        rows = places[start : start + _ROWS]
        distance = rows[:, None] - places
        scores = scale * (q[:, rows] @ k.mT) - m * distance
        weight = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        distance_sum += (weight * distance).sum((-2, -1))
        first_sum += weight[:, rows > 0, 0].sum(-1)
        for dtype in DTYPES:
            zeros[dtype] += ((weight <= half_of_the_smallest(dtype)) & (distance >= 0)).sum((-2, -1))
    columns: Columns = {
        "head": list(range(heads)),
        "slope": slopes.double().tolist(),
        "certified": reach.tolist(),
        "mean_distance": (distance_sum / n).tolist(),
        "first_token": (first_sum / (n - 1)).tolist(),
    }
    for dtype in DTYPES:
        columns[f"zero_{_name(dtype)}"] = (zeros[dtype] / (n * (n + 1) / 2)).tolist()
        columns[f"distinct_{_name(dtype)}"] = [told_apart(slope, dtype, n) for slope in slopes.double().tolist()]
    return columns


def half_of_the_smallest(dtype: torch.dtype) -> float:
    """Numbers up to this are zero in the dtype: half of its smallest subnormal, which rounds to even."""
    kept = torch.finfo(dtype)
    return float(kept.smallest_normal) * float(kept.eps) / 2


def told_apart(slope: float, dtype: torch.dtype, length: int) -> int:
    """The first distance d at which m·d and m·(d + 1) round to one number of the dtype; the length where there is none."""
    biases = (slope * torch.arange(length + 1, dtype=torch.float32)).to(dtype)
    same = (biases[1:] == biases[:-1]).nonzero()
    return int(same[0]) if len(same) else length


def totals(columns: Columns) -> dict[str, float | None]:
    """How many heads there are, how many have collapsed onto the first token, and how many are blind in each dtype."""

    def count(name: str, least: float) -> float:
        return float(sum(isinstance(value, float) and value >= least for value in columns[name]))

    blind = {f"blind_{_name(dtype)}": count(f"zero_{_name(dtype)}", BLIND) for dtype in DTYPES}
    return {"heads": float(len(columns["head"])), "collapsed": count("first_token", COLLAPSED), **blind}


def _of_the_lab(folder: Path) -> Loaded:
    model, config = load_checkpoint(folder)
    tokenizer = load_checkpoint_tokenizer(folder)
    method = type(model.position)
    if method.rotate is not PositionMethod.rotate or method.per_layer or method.add is not PositionMethod.add:
        raise ValueError(_NO_SLOPES.format(config.model.method))

    def run(tokens: Tensor, see: See) -> None:
        slopes = model.position.bias(Pass(tokens.shape[1], tokens.shape[1]))
        if slopes is None:
            slopes = torch.zeros(config.model.num_heads)
        if not isinstance(slopes, Tensor) or slopes.ndim != 1:
            raise ValueError(_NO_SLOPES.format(config.model.method))
        with _watched_blocks(model, slopes, see):
            model(tokens)

    def encode(text: str) -> Sequence[int]:
        tokens: list[int] = tokenizer.encode(text).tolist()
        return tokens

    name = f"{config.model.method}-{config.train.length}"
    return Loaded(name=name, length=config.train.length, encode=encode, run=run)


_NO_SLOPES = (
    "the model has {} positions, which are no slopes; certified reach is of linear biases: pass a model with alibi, "
    "alibi-learned, alibi-half or none"
)


@contextlib.contextmanager
def _watched_blocks(model: LanguageModel, slopes: Tensor, see: See) -> Iterator[None]:
    """Within the block every layer of a lab model is seen once its keys are made."""
    handles = []
    for number, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
        queries: list[Tensor] = []

        def keep(module: nn.Module, inputs: object, output: Tensor, *, queries: list[Tensor] = queries) -> None:
            queries.append(output)

        def show(
            module: nn.Module, inputs: object, output: Tensor, *, number: int = number, queries: list[Tensor] = queries
        ) -> None:
            query, key = (x.unflatten(-1, (len(slopes), -1)).transpose(1, 2) for x in (queries.pop(), output))
            see(number, query, key, slopes, query.shape[-1] ** -0.5)

        handles += [
            block.q.register_forward_hook(keep),
            block.k.register_forward_hook(show),
        ]  # in the order of the block
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_transformers(folder: Path) -> Loaded:
    kind = read_config(folder).get("model_type")
    model: Any
    if kind in loading.PATCHED:
        model = AutoModelForCausalLM.from_pretrained(folder)
        patch(model)
    else:
        model = ALiBiForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def run(tokens: Tensor, see: See) -> None:
        with watched(model.eval(), see):
            model(tokens, use_cache=False)

    def encode(text: str) -> Sequence[int]:
        tokens: list[int] = tokenizer(text)["input_ids"]
        return tokens

    return Loaded(name=folder.resolve().name, length=None, encode=encode, run=run)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
