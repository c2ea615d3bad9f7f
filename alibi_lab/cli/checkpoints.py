"""A trained model on the command line: its arguments, `alibi generate` and `alibi export`."""

import codecs
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from alibi_attn.cli.console import needs
from alibi_lab.cli.options import documented
from alibi_lab.lab.config import nearest

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run's folder; RUN:alibi picks one of its models.", show_default=False)
]
Method = Annotated[
    str | None,
    typer.Option(help="Code of a position method that is not built in, FILE.py:Class. It is never imported otherwise."),
]


def find(path: Path) -> Path:
    """The folder of a trained model: the given one, or the model of a run's folder.

    Raises:
        ValueError: the run has no such model, or several; lists them.
    """
    run, colon, name = str(path).rpartition(":")
    folder, name = (Path(run), name) if colon and not path.exists() else (path, "")
    if not (folder / "checkpoints").is_dir():
        return path
    root = folder / "checkpoints"
    models = sorted({step.parent.parent for step in root.glob("**/step-*/config.json")})
    found = [model for model in models if not name or name in _names(model)]
    if len(found) == 1:
        return found[0]
    choices = "; ".join(f"{folder}:{'/'.join(model.parts[-2:]).rpartition('-')[0]}" for model in found or models)
    known = tuple(dict.fromkeys(one for model in models for one in _names(model)))
    guess = nearest(name, known) if name and not found else ""
    raise ValueError(
        f"{path} has {len(found) or 'no'} such models{guess}; pass one of: {choices}"
        if models
        else f"{folder} has no models yet"
    )


def validation_text(path: Path, method: str | None) -> str:
    """The start of a checkpoint's validation text; `method` is the code of its position method."""
    with needs("lab"):
        from alibi_lab.lab.data.corpus import load_corpus
        from alibi_lab.lab.training.checkpoint import load_checkpoint, stored_tokens
    corpus = load_corpus(load_checkpoint(path, method=method)[1].data, stored_tokens(path))
    return corpus.tokenizer.decode(corpus.valid[: 1 << 16]).decode(errors="ignore")


@documented
def generate(
    checkpoint: Checkpoint,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: Annotated[int | None, typer.Option(show_default="all")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    method: Method = None,
) -> None:
    """Continue a text with a trained model, token by token with a KV cache.

    [dim]alibi generate runs/quick/checkpoints/quick/alibi-128/seed-0-… --prompt "def main" --max-new-tokens 500[/]

    Args:
        prompt: Text to continue.
        max_new_tokens: Number of tokens to add, even beyond the trained length.
        temperature: 0 always takes the most likely token; 1 samples from the model's distribution.
        top_k: Sample only from this many most likely tokens.
        seed: Seed of the sampling.
    """
    with needs("lab"):
        from alibi_lab.lab.model import generation
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = find(checkpoint)
    model, _ = load_checkpoint(checkpoint, method=method)
    tokenizer = load_checkpoint_tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    stream = generation.generate(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    print(prompt, end="", flush=True)
    printed = len(tokenizer.decode(ids))
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids)
        print(decoder.decode(text[printed:]), end="", flush=True)
        printed = len(text)
    print(decoder.decode(b"", final=True))


@documented
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(show_default=False)],
    family: Literal["mpt"] = "mpt",
) -> None:
    """Write a trained model as a checkpoint that AutoModelForCausalLM loads with equal logits, tokenizer included.

    The model must be trained with [bold]model.architecture=mpt[/] and ALiBi. No transformers family has the norm and
    feed-forward of the default architecture, "modern".

    [dim]alibi run quick --set model.architecture=mpt --out runs/mpt[/]

    [dim]alibi export runs/mpt/checkpoints/quick/alibi-128/seed-0-… my-mpt[/]

    Args:
        out: New folder to write.
        family: Model family to export to.
    """
    with needs("hf,lab"):
        from alibi_attn.hf.readers.export import DecoderConfig, export_mpt
        from alibi_attn.inspect import saved_tokenizer
        from alibi_lab.lab.model.language_model import decoder_state
        from alibi_lab.lab.training.checkpoint import load_checkpoint, load_checkpoint_tokenizer
    checkpoint = find(checkpoint)
    model, config = load_checkpoint(checkpoint)
    about = DecoderConfig(num_heads=config.model.num_heads, trained_length=config.train.length)
    tokenizer = saved_tokenizer(load_checkpoint_tokenizer(checkpoint).dump())
    path = export_mpt(decoder_state(model), about, out, tokenizer=tokenizer)
    typer.echo(f"{family}  {path}")


def with_options(message: str) -> str:
    """The error of a config for `alibi eval`, which has options instead of fields.

    >>> with_options("eval.lengths is 'a' but must be a whole number")
    "--lengths is 'a' but must be a whole number"
    """
    return re.sub(r"\b(?:data|eval)\.(\w+)", lambda field: f"--{field[1].replace('_', '-')}", message)


def _names(model: Path) -> tuple[str, str, str]:
    """The names that select a model: "alibi", "alibi-128" and "alibi-128/seed-0"."""
    method, seed = model.parts[-2], model.name.rpartition("-")[0]
    return method.rpartition("-")[0], method, f"{method}/{seed}"
