"""Reads the sentence-transformers settings (pooling, prompts, normalization) from a model folder.

modules.json lists the modules, 1_Pooling/config.json selects mean or first token, sentence_bert_config.json gives the maximum
length. All are optional; the default is the mean. Unsupported settings raise an error that names them.
Read next: `sentence_encoder.py`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from alibi_attn.hf.readers import checkpoint_files
from alibi_attn.hf.readers.families.family import Options

Pooling = Literal["mean", "cls"]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls")

_POOLING = "1_Pooling"
# Older versions store one flag per pooling mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Settings of the transformer module that change the model's input.
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
        ValueError: a damaged file, unsupported modules or pooling, or a ColBERT.
    """
    about = _options(folder / checkpoint_files.CONFIG)
    if (folder / "artifact.metadata").exists() or "ColBERT" in str(about.values.get("architectures")):
        raise ValueError(
            f"{folder} is a ColBERT, which makes one vector per token, not one per text; load it with ALiBiBertModel, and "
            "multiply its hidden states by the folder's linear.weight"
        )
    listing = folder / "modules.json"
    names, normalize = _modules(listing) if listing.exists() else (("", _POOLING), False)
    encoder, pooling = (folder / name for name in names)
    options = _options(encoder / "sentence_bert_config.json")
    for name in _UNSUPPORTED:
        if options.values.get(name):
            raise ValueError(f"{options.where} has {name} {options.values[name]!r}, which is not supported")
    settings = _options(folder / "config_sentence_transformers.json")
    prompts = settings.section("prompts")
    return PoolingConfig(
        encoder=encoder,
        normalize=normalize,
        max_seq_length=_positive(options, "max_seq_length"),
        prompts={name: prompts.text(name, "") for name in prompts.values} if settings.has("prompts") else None,
        default_prompt_name=settings.text("default_prompt_name", None),
        similarity=settings.text("similarity_fn_name", None),
        truncate_dim=_positive(settings, "truncate_dim"),
        **_pooling(_options(pooling / "config.json")),
    )


def _modules(path: Path) -> tuple[list[str], bool]:
    """The names of the folders of the encoder and of the pooling in a modules.json, and whether vectors are normalized."""
    listed = checkpoint_files.read_json(path, list)
    if not all(isinstance(module, dict) for module in listed):
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
        places.append(place)
    return places, len(kinds) == 3


def _kind(name: str) -> str:
    """The class name of a sentence-transformers module in any version; other names are returned unmodified."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _pooling(options: Options) -> dict[str, Any]:
    """The fields of `PoolingConfig` in the pooling's config.json."""
    modes = options.values.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if options.values.get(flag)]
    selected = [modes] if isinstance(modes, str) else modes
    if not isinstance(selected, list):
        raise ValueError(
            f"{options.where} has pooling_mode {modes!r} but it must be a name or a list of names, such as 'mean'"
        )
    selected = selected or ["mean"]
    if len(selected) != 1 or selected[0] not in POOLINGS:
        pooling = " and ".join(map(str, selected))
        raise ValueError(f"{options.where} has pooling {pooling} but only mean or cls alone is supported")
    name = "embedding_dimension" if "embedding_dimension" in options.values else "word_embedding_dimension"
    include_prompt = options.values.get("include_prompt") is not False
    return {"pooling": selected[0], "width": _positive(options, name), "include_prompt": include_prompt}


def _positive(options: Options, name: str) -> int | None:
    if options.has(name) and options.integer(name) < 1:
        raise ValueError(f"{options.where} has {name} {options.values[name]!r} but it must be a positive integer")
    return options.integer(name) if options.has(name) else None


def _options(path: Path) -> Options:
    """The options in a file; empty if it does not exist."""
    return Options(checkpoint_files.read_json(path) if path.exists() else {}, str(path))
