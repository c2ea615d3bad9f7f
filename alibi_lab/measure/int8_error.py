"""`alibi bench int8`: what linear layers in int8 change in a decoder trained by the lab: logits and perplexity on held-out text.

All linear layers except the output's are converted (`nn/quantized.py`), as with `patch(model, linears="int8")`. Logits and losses
of the same tokens are compared with fp32.

Cost: a minute.
Expected: a perplexity within 0.5 % of fp32.
"""

import copy
import datetime
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from alibi_attn.nn import quantized
from alibi_attn.nn.linear import Linear
from alibi_attn.units import perplexity
from alibi_lab import records
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.evaluation.losses import token_losses
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.training.checkpoint import load_checkpoint, step_folder, stored_tokens
from alibi_lab.measure.harness import Config, Say, report

BATCH_TOKENS = 4096


def int8_error(
    out: Path,
    *,
    checkpoint: Path | None = None,
    length: int = 512,
    tokens: int = 32_768,
    say: Say = print,
) -> list[Path]:
    """Compares the model of a checkpoint with its copy in int8, saves a record and returns its path.

    Args:
        checkpoint: folder of a trained model or of one of its steps; its tokens are in its run's folder.
        length: tokens per piece of text.
        tokens: most tokens of the held-out text.

    Raises:
        ValueError: no checkpoint, too little held-out text, or no int8 on this processor.
    """
    if checkpoint is None:
        raise ValueError("int8 needs a model trained by alibi run; pass --checkpoint RUN/checkpoints/STUDY/MODEL/SEED")
    quantized.check_supported()
    started = datetime.datetime.now(datetime.UTC)
    folder = step_folder(checkpoint)
    model, config = load_checkpoint(folder)
    corpus = load_corpus(config.data, stored_tokens(folder))
    available = min(len(corpus.valid) - 1, tokens)
    pieces = available // length
    if pieces < 2:
        raise ValueError(
            f"{available} tokens can be tested (--tokens is {tokens}, the held-out text has {len(corpus.valid)}) but two pieces "
            f"of {length} are needed; pass a shorter --length"
        )
    about: Config = {
        "method": config.model.method,
        "layers": config.model.num_layers,
        "width": config.model.embed_dim,
        "heads": config.model.num_heads,
        "ffn": config.model.ffn_dim,
        "vocabulary": config.model.vocab_size,
        "trained": config.train.length,
        "step": int(folder.name.removeprefix("step-")),
        "batch_tokens": config.train.batch_tokens,
        "corpus": corpus.facts,
        "length": length,
        "tokens": pieces * length,
    }
    records.expect_new(out, "int8", "decoder", about)
    metrics = compared(model, converted(model), corpus.valid, length=length, pieces=pieces)
    report("int8", {"decoder": metrics}, say)
    record = records.make("int8", "decoder", config=about, metrics=metrics, started=started)
    return [records.save(record, out)]


def converted(model: LanguageModel) -> LanguageModel:
    """A copy of the model whose blocks have linear layers in int8."""
    small = copy.deepcopy(model)
    quantized.convert(small.blocks, (nn.Linear, Linear))
    return small


def compared(
    model: LanguageModel, small: LanguageModel, tokens: Tensor, *, length: int, pieces: int
) -> dict[str, float | None]:
    """Errors of logits and the change of the perplexity, with a 95 % interval over pieces of the text.

    `logits_error` is the Frobenius norm of the difference over that of the logits, each minus its token's mean, which changes no
    probability.
    """
    difference = norm = 0.0
    worst = 1.0
    for piece in range(min(pieces, 8)):
        ids = tokens[None, piece * length : (piece + 1) * length].long()
        with torch.no_grad():
            true, found = (each(ids)[0].double() for each in (model, small))
        true, found = true - true.mean(-1, keepdim=True), found - found.mean(-1, keepdim=True)
        difference += float((found - true).square().sum())
        norm += float(true.square().sum())
        worst = min(worst, float(nn.functional.cosine_similarity(found, true, dim=-1).min()))
    windows = [(piece * length, (piece + 1) * length, length) for piece in range(pieces)]
    true_nats, nats = (
        token_losses(each, tokens, windows, batch_tokens=BATCH_TOKENS).loss_nats.double() for each in (model, small)
    )
    by_piece = (nats - true_nats).view(pieces, length).mean(1)
    change, spread = float(by_piece.mean()), 1.96 * float(by_piece.std()) / math.sqrt(pieces)
    return {
        "logits_error": math.sqrt(difference / norm),
        "logits_worst_cosine": worst,
        "perplexity": perplexity(float(true_nats.mean())),
        "int8_perplexity": perplexity(float(nats.mean())),
        "perplexity_change_percent": 100 * (perplexity(change) - 1),
        "perplexity_change_percent_low": 100 * (perplexity(change - spread) - 1),
        "perplexity_change_percent_high": 100 * (perplexity(change + spread) - 1),
    }
