"""Reads the sentence-transformers settings (pooling, prompts, normalization) from a model folder.

modules.json lists the modules, 1_Pooling/config.json selects mean or first token, sentence_bert_config.json gives the maximum
length. All are optional; the default is the mean. Unsupported settings raise an error that names them.
Read next: `sentence_encoder.py`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from alibi_attn.strict_json import JsonError, parse

Pooling = Literal["mean", "cls"]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls")

_MODULES, _POOLING, _TRANSFORMER, _SETTINGS = (
    "modules.json",
    "1_Pooling",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# Older versions store one flag per pooling mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Settings of the transformer module that change what the model reads.
_UNSUPPORTED = ("do_lower_case", "query_length", "document_length", "query_expansion", "processing_kwargs")


@dataclasses.dataclass(frozen=True)
class PoolingConfig:
    """Settings from the files.

    Args:
        encoder: the folder of the encoder and its tokenizer.
        pooling: "mean" of a text's tokens, or "cls", its first one.
        width: of the pooled vectors, if given.
        include_prompt: whether the tokens of a prompt are pooled too.
        normalize: scale vectors to length 1.
        max_seq_length: longer texts are cut, if given.
        prompts, default_prompt_name, similarity, truncate_dim: settings of sentence-transformers, unmodified.
    """

    encoder: Path
    pooling: Pooling = "mean"
    width: int | None = None
    include_prompt: bool = True
    normalize: bool = False
    max_seq_length: int | None = None
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    similarity: str | None = None
    truncate_dim: int | None = None


def read(folder: Path) -> PoolingConfig:
    """Read the files that exist.

    Raises:
        ValueError: a damaged file, or unsupported modules or pooling.
    """
    encoder, pooling_folder, normalize = _modules(folder)
    pooling, width, include_prompt = _pooling(pooling_folder)
    options = _object(encoder / _TRANSFORMER)
    for name in _UNSUPPORTED:
        if options.get(name):
            raise ValueError(f"{encoder / _TRANSFORMER} has {name} {options[name]!r}, which is not supported")
    settings = _object(folder / _SETTINGS)
    prompts = settings.get("prompts")
    if prompts is not None and not (
        isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())
    ):
        raise ValueError(f"{folder / _SETTINGS} is damaged: prompts is {prompts!r} but must map names to strings")
    return PoolingConfig(
        encoder=encoder,
        pooling=pooling,
        width=width,
        include_prompt=include_prompt,
        normalize=normalize,
        max_seq_length=_number(options, "max_seq_length", encoder / _TRANSFORMER),
        prompts=None if prompts is None else {str(name): text or "" for name, text in prompts.items()},
        default_prompt_name=_text(settings, "default_prompt_name", folder / _SETTINGS),
        similarity=_text(settings, "similarity_fn_name", folder / _SETTINGS),
        truncate_dim=_number(settings, "truncate_dim", folder / _SETTINGS),
    )


def _modules(folder: Path) -> tuple[Path, Path, bool]:
    """The folders of the encoder and of the pooling, and whether vectors are normalized."""
    path = folder / _MODULES
    if not path.exists():
        return folder, folder / _POOLING, False
    try:
        listed = parse(path.read_bytes())
    except JsonError as error:
        raise ValueError(f"{path} is damaged: {error}; download it again") from None
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ValueError(f"{path} is damaged: it lists no modules; download it again")
    kinds = [_kind(str(module.get("type"))) for module in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        names = ", ".join(str(module.get("type")) for module in listed) or "no module"
        raise ValueError(
            f"{path} lists {names}; only Transformer, Pooling and Normalize of sentence_transformers are supported, in this "
            "order"
        )
    places = []
    for module in listed[:2]:
        place = module.get("path", "")
        # Only the bare name of a folder inside this one, so that the file cannot point outside.
        if not isinstance(place, str) or not re.fullmatch(r"([\w-][\w.-]*)?", place, re.ASCII):
            raise ValueError(f"{path} is damaged: {place!r} is not the name of a folder next to it; download it again")
        places.append(folder / place)
    return places[0], places[1], len(kinds) == 3


def _kind(name: str) -> str:
    """The class name of a sentence-transformers module in any version; other names are returned unmodified."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _pooling(folder: Path) -> tuple[Pooling, int | None, bool]:
    path = folder / "config.json"
    options = _object(path)
    modes = options.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if options.get(flag)]
    selected = [modes] if isinstance(modes, str) else modes
    if not isinstance(selected, list):
        raise ValueError(f"{path} is damaged: pooling_mode is {modes!r} but must be a name; download it again")
    selected = selected or ["mean"]
    chosen = next((pooling for pooling in POOLINGS if selected == [pooling]), None)
    if chosen is None:
        raise ValueError(
            f"{path} has pooling {' and '.join(map(str, selected))} but only mean or cls alone is supported"
        )
    name = "embedding_dimension" if "embedding_dimension" in options else "word_embedding_dimension"
    return chosen, _number(options, name, path), options.get("include_prompt") is not False


def _number(options: dict[str, object], name: str, path: Path) -> int | None:
    value = options.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{path} has {name} {value!r} but it must be a positive integer")


def _text(options: dict[str, object], name: str, path: Path) -> str | None:
    value = options.get(name)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{path} has {name} {value!r} but it must be a string")


def _object(path: Path) -> dict[str, object]:
    """A JSON object; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = parse(path.read_bytes())
    except JsonError as error:
        raise ValueError(f"{path} is damaged: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__} but must hold an object; download it again")
    return value
