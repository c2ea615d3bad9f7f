"""The arguments of commands that use a trained model: its checkpoint, and the code of its position method."""

import re
from pathlib import Path
from typing import Annotated

import typer

from alibi_attn.cli.console import needs
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
