"""Loads the tokenizer in the folder of a model, and encodes a text for that model."""

from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from alibi_attn.hf.readers import checkpoint_files

_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)


def check(folder: Path) -> None:
    """Looks for the files of a tokenizer without loading them.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a damaged file.
    """
    if not any(any(folder.glob(files)) for files in _VOCABULARIES):  # transformers would create an empty one
        raise FileNotFoundError(f"{folder} has no tokenizer, neither tokenizer.json nor a vocabulary; download it")
    if (path := folder / "tokenizer.json").exists():
        checkpoint_files.read_json(path)


def load(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. Code in it is never run.

    Raises:
        FileNotFoundError, ValueError: see `check`; or transformers cannot load it.
    """
    check(folder)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        try:
            return AutoTokenizer.from_pretrained(folder, **options)
        except (
            StrictDataclassError
        ):  # the model's config is not one of transformers, such as that of an MPT with grouped heads
            return AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig(), **options)
    except _ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ValueError(
            f"{folder} has no tokenizer that transformers can load ({reason}); download it again"
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel) -> list[int]:
    """The token ids of a text, all of which the model has embeddings for.

    Raises:
        ValueError: the vocabulary is that of another model.
    """
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    known = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    if ids and max(ids) >= known:
        raise ValueError(
            f"the tokenizer of {model.config.name_or_path} gives token id {max(ids)} but the model has {known} token ids, "
            "0 and up; download both from one place"
        )
    return ids
