"""`alibi heads rollout`: attention accumulated over the layers, and which places of the text it ends at.

    P_ℓ = A_ℓ · P_(ℓ−1), P_0 = 1        A_ℓ is the attention of layer ℓ, averaged over its heads
    P_ℓ = ½·(A_ℓ + 1)·P_(ℓ−1)           "with residual": half of each layer's output is its input (Abnar and Zuidema 2020,
                                        attention rollout, arXiv:2005.00928)

Row i of P_ℓ says from which tokens the output of layer ℓ at token i comes, if values are only mixed. Wu, Wang, Jegelka and
Jadbabaie 2025 (arXiv:2502.01951) prove that under a causal mask with bounded scores all of it ends at the first token as the
depth grows (theorem 4.1), and that a bias −m·d adds a decay with the distance, against which the depth works (theorem 4.5).
Why: with scores of 0 a layer moves back by 1 / (e^m − 1) tokens on average, so the first token has won after about
n·(e^m − 1) layers; without a bias half of the way is left after each layer.

`theory` computes their setting, `rolled_out` measures a model (`loading.py` opens it). Per depth and text, averaged over
the queries of the second half of the text, with t the number of keys of a query: the shares of the first token, of the first
⌈t/10⌉ keys, and of the last ⌈t/10⌉. Cost: n/D attention calls per layer and way, D the head size; `theory`, seconds. Expected: a
trained model of 12 layers is near their setting (docs/lab-results.md).
"""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from alibi_attn import alibi_attention, alibi_slopes
from alibi_lab import records
from alibi_lab.lab.config import ModelConfig
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import Attention, Pass, PositionMethod, Wrapping
from alibi_lab.lab.model.rotary import rotary_frequencies

KIND = "rollout"
WAYS = ("attention", "with residual")
TEXTS = 8  # stretches of a text, as far as it has them
THEORY_LENGTH, THEORY_DEPTH, RANDOM_DEPTH = 512, 4096, 64
BOUND = 2.0  # of the random scores and of the rotary ones

Rows = list[tuple[records.Json, ...]]
COLUMNS = ("way", "depth", "text", "first_token", "first_tenth", "last_tenth")


class Rollout:
    """P of some texts, both ways, layer by layer; `rows` are those of a record."""

    def __init__(self, texts: int, length: int) -> None:
        self.products = dict.fromkeys(WAYS, torch.eye(length).repeat(texts, 1, 1))
        self.depth = 0
        self.rows: Rows = []

    def add(self, attend: Callable[[Tensor], Tensor], key: Tensor) -> None:
        """One more layer, whose attention maps values of the shape of its keys [B, K, n, D] to outputs [B, H, n, D].

        Attending to columns of P as values gives columns of A·P, so that every method works as it computes its attention.
        """
        self.depth += 1
        heads, head_dim = key.shape[1], key.shape[3]
        for way, product in self.products.items():
            mixed = torch.empty_like(product)
            for part, into in zip(product.split(head_dim, -1), mixed.split(head_dim, -1), strict=True):
                values = torch.nn.functional.pad(part, (0, head_dim - part.shape[-1]))
                outputs = attend(values[:, None].expand(-1, heads, -1, -1).contiguous())
                into.copy_(outputs.mean(1)[..., : part.shape[-1]])
            self.products[way] = mixed if way == WAYS[0] else (mixed + product) / 2
            self.rows += measured(way, self.depth, self.products[way])


def measured(way: str, depth: int, product: Tensor) -> Rows:
    """The rows of P [B, n, n], one per text."""
    n = product.shape[-1]
    keys, queries = torch.arange(n), torch.arange(n // 2, n)[:, None]
    tenth = (queries + 10) // 10  # ⌈t/10⌉ of t = i + 1 keys
    masks = (keys == 0, keys < tenth, (keys <= queries) & (keys > queries - tenth))
    shares = [(product[:, n // 2 :].double() * mask).sum(-1).mean(-1) for mask in masks]
    return [(way, depth, text, *values) for text, values in enumerate(torch.stack(shares, -1).tolist())]


def rolled_out(
    name: str, config: Mapping[str, records.Json], tokens: Tensor, run: Callable[[Tensor, Rollout], None]
) -> records.Record:
    """A record of a model on texts [B, n]; `run` calls `Rollout.add` once per layer."""
    started = datetime.datetime.now(datetime.UTC)
    rollout = Rollout(*tokens.shape)
    with torch.no_grad():
        run(tokens, rollout)
    return _record(name, {**config, "texts": len(tokens), "length": tokens.shape[1]}, rollout.rows, started)


def run_of_the_lab(model: LanguageModel, tokens: Tensor, rollout: Rollout) -> None:
    """The forward pass of a model of the lab, for `rolled_out`.

    Raises:
        ValueError: its method reads texts in segments, so that no layer sees the whole text.
    """
    method = model.position
    if method.segment is not None:
        raise ValueError(
            f"the model has {model.config.method} positions, which read texts in segments, but a rollout needs layers that see "
            "the whole text; pass a model of another method"
        )
    try:
        model.position = _Accumulating(method, rollout)
        model.eval()(tokens)
    finally:
        model.position = method


class _Accumulating(Wrapping):
    def __init__(self, method: PositionMethod, rollout: Rollout) -> None:
        super().__init__(method)
        self.rollout = rollout

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Pass, default: Attention) -> Tensor:
        self.rollout.add(lambda values: self.method.attend(q, k, values, at, default), k)
        return self.method.attend(q, k, v, at, default)


def add_layer(rollout: Rollout, layer: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
    """One more layer of a model of transformers, as `watched` reports it."""
    query, key = query.float(), key.float()
    rollout.add(lambda values: alibi_attention(query, key, values, slopes, scale=scale), key)


def theory(length: int = THEORY_LENGTH, num_heads: int = 8, seed: int = 0) -> records.Record:
    """A record of their setting, in float64: every layer has the same attention, or random scores within ±BOUND.

    The scores are 0 except for rotary positions, where q = k in all tokens, with the score BOUND at distance 0.
    """
    started = datetime.datetime.now(datetime.UTC)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    causal = torch.zeros(length, length, dtype=torch.float64).masked_fill(distance < 0, -math.inf)
    frequencies = rotary_frequencies(ModelConfig.embed_dim // ModelConfig.num_heads, length, length, "none").double()
    rotary = BOUND * (distance[..., None].double() * frequencies).cos().mean(-1)
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)
    biases = causal - slopes[:, None, None] * distance
    rows: Rows = []
    for way, scores in {
        "no mask": torch.zeros_like(causal),
        "causal mask": causal,
        "rotary": causal + rotary,
        **{f"ALiBi, m = 1/{round(1 / m)}": causal - m * distance for m in (1 / 2, 1 / 16, 1 / 256)},
        f"ALiBi, {num_heads} heads": biases,
    }.items():
        depth, product = 1, scores.softmax(-1).view(-1, length, length).mean(0)
        while depth <= THEORY_DEPTH:
            rows += measured(way, depth, product[None])
            depth, product = 2 * depth, product @ product
    generator = torch.Generator().manual_seed(seed)
    for way, bias in {"causal mask, random scores": causal[None], "ALiBi, random scores": biases}.items():
        product = torch.eye(length, dtype=torch.float64)
        for depth in range(1, RANDOM_DEPTH + 1):
            scores = BOUND * (2 * torch.rand(bias.shape, generator=generator, dtype=torch.float64) - 1)
            product = (scores + bias).softmax(-1).mean(0) @ product
            if depth & (depth - 1) == 0:
                rows += measured(way, depth, product[None])
    config: Mapping[str, records.Json] = {"length": length, "heads": num_heads, "bound": BOUND, "seed": seed}
    return _record("theory", config, rows, started)


def stretches(tokens: Sequence[int], length: int) -> Tensor:
    """The first TEXTS stretches of `length` tokens, as far as there are whole ones, [B, length].

    Raises:
        ValueError: not even one.
    """
    if len(tokens) < max(length, 2):
        raise ValueError(f"the text has {len(tokens)} tokens but {max(length, 2)} are needed; pass a longer text")
    count = min(TEXTS, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def _record(name: str, config: Mapping[str, records.Json], rows: Rows, started: datetime.datetime) -> records.Record:
    columns = {column: [row[at] for row in rows] for at, column in enumerate(COLUMNS)}
    return records.make(KIND, name, config=config, metrics={}, curves={KIND: columns}, started=started)
