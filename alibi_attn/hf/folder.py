"""A checkpoint folder of transformers, whole or not there at all: weights, config, tokenizer."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel


def check_new(folder: Path) -> None:
    """Raises FileExistsError where something is there."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a checkpoint is never overwritten: pass a new folder")


def write(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer | None) -> Path:
    """Save the model, and the tokenizer beside it so that `AutoTokenizer` finds it. None with 256 tokens is that of bytes."""
    if tokenizer is None and model.config.vocab_size == 256:
        tokenizer = byte_tokenizer()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (temporary / "tokenizer_config.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b of the text in UTF-8.

    >>> byte_tokenizer().encode("añ").ids
    [97, 195, 177]
    """
    # The printable stand-ins that byte-level tokenizers write for bytes: themselves where printable, else from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
