"""Configs as text: fields changed by name ("train.steps=50"), configs written to records and read back."""

import contextlib
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alibi_lab.lab.config import TASK_CORPUS, ConfigError, RunConfig, SymbolTask, nearest
from alibi_lab.records import Json

_SECTIONS = typing.get_type_hints(RunConfig)  # "model", "data", "train", "eval" and their classes
# Newer fields are written only if they differ from the default, so that the identities of older records stay the same.
LATER = {"text_field", "context_parallel", "exchange_timeout_s", "compile", "trials", "memory", "sinks"}
# The names of other libraries.
_SYNONYMS = {
    "model.embed_dim": ("width", "hidden_size", "d_model", "n_embd", "dim"),
    "model.ffn_dim": ("intermediate_size", "mlp_dim", "hidden_dim", "d_ff"),
    "model.num_layers": ("layers", "n_layers", "n_layer", "depth"),
    "model.num_heads": ("heads", "n_heads", "n_head"),
    "model.method": ("positions", "position", "pos"),
    "train.length": ("seq_len", "context", "context_length", "max_length", "block_size"),
    "train.steps": ("epochs", "iterations", "max_steps", "num_steps"),
    "train.batch_tokens": ("batch_size", "batch"),
    "train.learning_rate": ("lr", "rate"),
    "train.warmup_steps": ("warmup",),
    "data.text": ("file", "files", "path"),
}
_OF_TEXT = ("data.corpus", "data.text", "data.tokenizer")


def override(config: RunConfig, changes: Mapping[str, str]) -> RunConfig:
    """The config with fields changed by name; values are text, parsed by the field's type.

    Another `data.tokenizer` of known size also changes `model.vocab_size` ("bytes": 256, "bpe:2048": 2,048), unless this is
    changed too; the number of "words" is only known after reading the text. A run that is tested on the symbol task of its own
    corpus keeps this corpus, because no text can replace it; changing `eval.tasks` lifts this.

    Raises:
        ConfigError: an unknown name (the message suggests one) or an invalid value.

    >>> override(RunConfig(), {"train.steps": "50", "eval.lengths": "128,256"}).eval.lengths
    (128, 256)
    >>> override(RunConfig(), {"data.tokenizer": "bpe:2048"}).model.vocab_size
    2048
    """
    names = field_names()
    task = TASK_CORPUS.fullmatch(config.data.corpus)
    of_symbols = task is not None and task[1] in config.eval.tasks and task[1] in typing.get_args(SymbolTask)
    if of_symbols and "eval.tasks" not in changes:
        changes = {name: text for name, text in changes.items() if name not in _OF_TEXT}
    if "data.tokenizer" in changes and "model.vocab_size" not in changes:
        changes = {**changes, **_vocabulary(changes["data.tokenizer"])}
    sections: dict[str, dict[str, object]] = {}
    for name, text in changes.items():
        if name not in names:
            guess = _suggestion(name, names)
            raise ConfigError(f"there is no field {name!r}{guess}; the fields are: {', '.join(names)}")
        section, field = name.split(".")
        kind = typing.get_type_hints(_SECTIONS[section])[field]
        sections.setdefault(section, {})[field] = _parse(text, kind)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def field_meanings() -> dict[str, str]:
    """The comment of every field in `config.py`, by name.

    >>> field_meanings()["train.length"]
    'tokens per training example, L in the paper'
    """
    meanings = dict.fromkeys(field_names(), "")
    for section, kind in _SECTIONS.items():
        for field, comment in re.findall(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(kind), re.MULTILINE):
            meanings[f"{section}.{field}"] = comment
    return meanings


def _suggestion(name: str, names: tuple[str, ...]) -> str:
    last = name.rpartition(".")[2].lower()
    field = next((field for field, others in _SYNONYMS.items() if last in others), None)
    return f" (did you mean {field!r}?)" if field else nearest(name, names)


def _vocabulary(tokenizer: str) -> dict[str, str]:
    """The size of the model's vocabulary that a tokenizer needs; empty if it depends on the text."""
    size = {"bytes": "256", "words": ""}.get(tokenizer, tokenizer.removeprefix("bpe:"))
    path = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
    if path.suffix == ".json" and path.is_file():
        import tokenizers  # of the extra "lab"; loading it takes a moment

        try:
            size = str(tokenizers.Tokenizer.from_file(str(path)).get_vocab_size())
        except Exception as error:  # tokenizers raises nothing more specific
            found = f"{path} is not a tokenizer that can be read ({error})"
            raise ConfigError(f"data.tokenizer is {tokenizer!r} but {found}") from None
    return {"model.vocab_size": size} if size.isdecimal() else {}


def field_names() -> tuple[str, ...]:
    """The names of all fields: "model.method", "train.steps", ...

    >>> "train.steps" in field_names()
    True
    """
    return tuple(f"{name}.{field.name}" for name, kind in _SECTIONS.items() for field in dataclasses.fields(kind))


def to_json(config: RunConfig) -> dict[str, Json]:
    """The config as nested dictionaries of plain values, as in records and checkpoints."""
    found: dict[str, Json] = {}
    for section, fields in dataclasses.asdict(config).items():
        default = type(getattr(config, section))
        kept = {name: value for name, value in fields.items() if name not in LATER or value != getattr(default, name)}
        found[section] = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
    return found


def from_json(data: object) -> RunConfig:
    """The config that `to_json` wrote.

    Raises:
        ConfigError: sections or fields differ from those of this version.
    """
    if not isinstance(data, Mapping) or not data.keys() >= _SECTIONS.keys():
        raise ConfigError(f"a config has the sections {', '.join(_SECTIONS)}; this one has others")
    return RunConfig(**{name: _section(name, kind, data[name]) for name, kind in _SECTIONS.items()})


def _section(name: str, kind: Any, data: object) -> Any:
    hints = typing.get_type_hints(kind)
    if not isinstance(data, Mapping) or not hints.keys() - LATER <= data.keys() <= hints.keys():
        raise ConfigError(f"section {name!r} of a config has the fields {', '.join(hints)}; this one has others")
    return kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in data.items()})


def _parse(text: str, kind: object) -> object:
    """The value of this type that a text writes; text that writes none remains text, which the config refuses."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_parse(item.strip(), options[0]) for item in text.split(",") if item.strip())
    if isinstance(kind, types.UnionType):
        return None if text.lower() == "none" else _parse(text, options[0])
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):  # not a number, or an integer beyond all floats
            value = int(text) if kind is int else float(text)
            return value if math.isfinite(value) else text
    return text
