"""A checkpoint folder of transformers, whole or not there at all: weights, config, tokenizer."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from alibi_attn.hf.tokenizing import byte_tokenizer


def check_new(folder: Path) -> None:
    """Raises FileExistsError where something is there."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a checkpoint is never overwritten: pass a new folder")


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `folder` at the end of the block; nothing stays of it where that raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer | None) -> Path:
    """Save the model, and the tokenizer beside it so that `AutoTokenizer` finds it. None with 256 tokens is that of bytes."""
    if tokenizer is None and model.config.vocab_size == 256:
        tokenizer = byte_tokenizer()
    with written_whole(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (temporary / "tokenizer_config.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return folder
