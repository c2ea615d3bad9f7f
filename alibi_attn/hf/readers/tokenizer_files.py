"""Loads the tokenizer in the folder of a model, and encodes a text for that model."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoTokenizer, BatchEncoding, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from alibi_attn.hf.readers import checkpoint_files
from alibi_attn.strict_json import NO_CHARACTER, lone_surrogate

_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")


def load(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. Code in it is never run.

    Raises:
        FileNotFoundError: it has no files of a tokenizer.
        ValueError: a damaged file, or transformers cannot load it.
    """
    if not any(any(folder.glob(files)) for files in _VOCABULARIES):  # transformers would create an empty one
        raise FileNotFoundError(f"{folder} has no tokenizer, neither tokenizer.json nor a vocabulary; download it")
    if (path := folder / "tokenizer.json").exists():
        checkpoint_files.read_json(path)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    with _explained(f"{folder} has no tokenizer that transformers can load"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except (
            StrictDataclassError
        ):  # the model's config is not one of transformers, as that of an MPT with grouped heads
            tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig(), **options)
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}")
    return tokenizer


def encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], names: Sequence[str] | None = None, **options: Any
) -> BatchEncoding:
    """What the tokenizer returns for these texts; no text is cut unless an option says so.

    Args:
        names: of the texts, for errors; None for "text 0" and so on.

    Raises:
        ValueError: a text holds half of a surrogate pair, or the tokenizer is damaged.
    """
    for number, text in enumerate(texts):
        if half := lone_surrogate(text):
            name = f"text {number}" if names is None else names[number]
            raise ValueError(f"{name} has {half}, {NO_CHARACTER}; correct it, or leave the text out")
    with _explained(f"the tokenizer of {tokenizer.name_or_path} cannot encode a text"):
        return tokenizer(list(texts), verbose=False, **options)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel) -> list[int]:
    """The token ids of a text, all of which the model has embeddings for.

    Raises:
        ValueError: see `encoded`; or the vocabulary is that of another model.
    """
    (ids,) = encoded(tokenizer, [text], ["the text"])["input_ids"]
    known = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    if ids and max(ids) >= known:
        raise ValueError(
            f"the tokenizer of {model.config.name_or_path} gives token id {max(ids)} but the model has {known} token ids, "
            "0 and up; download both from one place"
        )
    return cast("list[int]", ids)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns errors of tokenizers into a ValueError: they are of type Exception, and BaseException where its Rust code panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ValueError(f"{what} ({reason}); download it again") from error
