"""Opens a trained model whose queries and keys can be captured: a checkpoint of the lab, or a folder of transformers."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from alibi_attn import attention_rows
from alibi_attn.inspect import encode, load_decoder, read_config, watched
from alibi_lab.heads import rollout
from alibi_lab.lab.model.layer_outputs import by_head, outputs_of, slopes_of
from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer, newest
from alibi_lab.records import Json

Config: TypeAlias = dict[str, Json]
See: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float], None]  # as in `alibi_attn.inspect.watched`
_WEIGHTS = 2**20  # computed at a time, eight MiB


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model whose queries and keys can be captured.

    Args:
        length: the trained length; None if unknown.
        encode: text -> tokens.
        facts: of its training, for the config of a record.
        run: runs the model on tokens [1, n] and calls a function per layer (see `alibi_attn.inspect.watched`).
        accumulate: runs it on tokens [B, n] for `rollout.rolled_out`.
    """

    name: str
    length: int | None
    facts: Config
    encode: Callable[[str], Sequence[int]]
    run: Callable[[Tensor, See], None]
    accumulate: Callable[[Tensor, rollout.Rollout], None]


def load(folder: Path, method: str | None = None) -> Loaded:
    """The model in a folder, written by the lab or by transformers."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; pass a lab checkpoint or a transformers folder")
    if newest(folder) is not None or "schema" in read_config(folder):
        return _of_the_lab(folder, method)
    return _of_transformers(folder)


def tokens_of(model: Loaded, text: str, length: int | None) -> Tensor:
    """[1, n], the first tokens of a text: `length`, or twice the trained length, or 1,024 if that is unknown.

    Raises:
        ValueError: the text has fewer than two tokens, or fewer than `length`.
    """
    tokens = list(model.encode(text))[: length or 2 * (model.length or 512)]
    if len(tokens) < 2 or (length and len(tokens) < length):
        raise ValueError(f"the text has {len(tokens)} tokens but {length or 2} are needed; pass a longer text")
    return torch.tensor([tokens])


def weights_of(query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (distances i − j [R, n], weights [H, R, n]) in float64 for R queries at a time; query, key as in `See`."""
    query, key, (heads, n) = query.double(), key.double(), query.shape[1:3]
    places = torch.arange(n, device=query.device)
    for rows in places.split(max(1, _WEIGHTS // (heads * n))):
        yield rows[:, None] - places, attention_rows(query, key, slopes, rows=rows, scale=scale)[0]


def config_of(model: Loaded, text: str) -> Config:
    """What identifies a model and a text in a record."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"model": model.name, "trained": model.length, "text_sha256": digest, **model.facts}


def _of_the_lab(folder: Path, method: str | None) -> Loaded:
    model, config = load_checkpoint(folder, method=method)
    tokenizer = load_checkpoint_tokenizer(folder)

    def run(tokens: Tensor, see: See) -> None:
        slopes = slopes_of(model, tokens.shape[1])
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
