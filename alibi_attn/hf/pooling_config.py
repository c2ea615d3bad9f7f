"""Reads the sentence-transformers settings (pooling, prompts, normalization) from a model folder.

modules.json lists the modules, 1_Pooling/config.json says mean or first token, sentence_bert_config.json gives the maximum
length. All are optional; the default is the mean. Settings that are not supported here are refused by name. Read next:
`sentence_encoder.py`.
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
# Folders of older versions have a flag for every kind.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Settings of the transformer module that change what the model reads.
_NOT_HERE = ("do_lower_case", "query_length", "document_length", "query_expansion", "processing_kwargs")


@dataclasses.dataclass(frozen=True)
class PoolingConfig:
    """What the files say.

    Args:
        encoder: the folder of the encoder and its tokenizer.
        pooling: "mean" of a text's tokens, or its first one.
        width: of the vectors that are pooled, where it is said.
        include_prompt: whether the tokens of a prompt are pooled too.
        normalize: vectors of length 1.
        max_seq_length: longer texts are cut, where it is said.
        prompts, default_prompt_name, similarity, truncate_dim: of sentence-transformers, as they stand there.
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
    """Read what there is.

    Raises:
        ValueError: a damaged file, or modules and poolings that cannot be computed here.
    """
    encoder, pooling_folder, normalize = _modules(folder)
    pooling, width, include_prompt = _pooling(pooling_folder)
    said = _object(encoder / _TRANSFORMER)
    for name in _NOT_HERE:
        if said.get(name):
            raise ValueError(f"{encoder / _TRANSFORMER} says {name} {said[name]!r}, which is not done here")
    settings = _object(folder / _SETTINGS)
    prompts = settings.get("prompts")
    if prompts is not None and not (
        isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())
    ):
        raise ValueError(f"{folder / _SETTINGS} is damaged: prompts is {prompts!r} but must map names to texts")
    return PoolingConfig(
        encoder=encoder,
        pooling=pooling,
        width=width,
        include_prompt=include_prompt,
        normalize=normalize,
        max_seq_length=_number(said, "max_seq_length", encoder / _TRANSFORMER),
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
            f"{path} asks for {names}; what is done here is Transformer, Pooling and Normalize of sentence_transformers, in this "
            "order"
        )
    places = []
    for module in listed[:2]:
        place = module.get("path", "")
        # A folder inside of this one, by its bare name: nothing leads out of it.
        if not isinstance(place, str) or not re.fullmatch(r"([\w-][\w.-]*)?", place, re.ASCII):
            raise ValueError(
                f"{path} is damaged: {place!r} is not the name of a folder inside of it; download it again"
            )
        places.append(folder / place)
    return places[0], places[1], len(kinds) == 3


def _kind(name: str) -> str:
    """The class of a module of sentence-transformers, whatever the version; another name as it is."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _pooling(folder: Path) -> tuple[Pooling, int | None, bool]:
    path = folder / "config.json"
    said = _object(path)
    modes = said.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if said.get(flag)]
    asked = [modes] if isinstance(modes, str) else modes
    if not isinstance(asked, list):
        raise ValueError(f"{path} is damaged: pooling_mode is {modes!r} but must be a name; download it again")
    asked = asked or ["mean"]
    chosen = next((pooling for pooling in POOLINGS if asked == [pooling]), None)
    if chosen is None:
        raise ValueError(
            f"{path} asks for the pooling {' and '.join(map(str, asked))}; what is done here is mean, or cls alone"
        )
    name = "embedding_dimension" if "embedding_dimension" in said else "word_embedding_dimension"
    return chosen, _number(said, name, path), said.get("include_prompt") is not False


def _number(said: dict[str, object], name: str, path: Path) -> int | None:
    value = said.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{path} says {name} {value!r} but it must be a positive whole number")


def _text(said: dict[str, object], name: str, path: Path) -> str | None:
    value = said.get(name)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{path} says {name} {value!r} but it must be a text")


def _object(path: Path) -> dict[str, object]:
    """A JSON object; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = parse(path.read_bytes())
    except JsonError as error:
        raise ValueError(f"{path} is damaged: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__} but it must be an object; download it again")
    return value
