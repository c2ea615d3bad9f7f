"""Sentence embeddings: an encoder with its tokenizer and its pooling, and the same as a SentenceTransformer.

sentence-transformers is loaded by that function alone. Read before: `pooling_config.py`; next: `embedding.py`, for long work.
"""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from alibi_attn.hf import checkpoint_files, pooling_config
from alibi_attn.hf.encoder.models import ALiBiBertModel
from alibi_attn.hf.pooling_config import PoolingConfig
from alibi_attn.strict_json import JsonError, parse

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

LONGEST = 8192  # tokens, where neither the folder nor the tokenizer says a number: ALiBi itself has no longest text
_NO_LIMIT = 2**30  # tokenizers without a limit say a number beyond
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_TOKENIZER_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)


@dataclasses.dataclass(frozen=True)
class Sentences:
    """What makes vectors of texts.

    Args:
        model: the encoder, in evaluation mode.
        folder: what its folder says of pooling.
        max_seq_length: tokens of a text, special ones included, that are read; the rest is cut off.
    """

    model: ALiBiBertModel
    tokenizer: PreTrainedTokenizerBase
    folder: PoolingConfig
    max_seq_length: int


def load(
    folder_or_id: str | os.PathLike[str],
    *,
    max_seq_length: int | None = None,
    dtype: torch.dtype | str | None = None,
    **hub: Any,
) -> Sentences:
    """Encoder, tokenizer and pooling of a folder, or of a repository of the hub; no code from there is run.

    Args:
        max_seq_length: default what the folder says, else what the tokenizer says, else 8,192.
        dtype: as `ALiBiBertModel.from_pretrained` has it.
        hub: revision, cache_dir, token and local_files_only of `checkpoint_files.resolve`.

    Raises:
        OSError: neither a folder nor a repository, or files that are not there.
        ValueError: a damaged file, or a model or pooling of another kind.
    """
    place = checkpoint_files.resolve(folder_or_id, **hub)
    said = pooling_config.read(place)
    model = ALiBiBertModel.from_pretrained(said.encoder, dtype=dtype)
    model.config.name_or_path = str(folder_or_id)
    if said.width not in (None, model.config.hidden_size):
        raise ValueError(f"{place} pools vectors of width {said.width} but its model has {model.config.hidden_size}")
    tokenizer = _tokenizer(said.encoder)
    known = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else LONGEST
    if max_seq_length is not None and type(max_seq_length) is not int:
        raise TypeError(f"max_seq_length is {max_seq_length!r} but must be an integer")
    longest = said.max_seq_length or known if max_seq_length is None else max_seq_length
    least = tokenizer.num_special_tokens_to_add() + 1
    if longest < least:
        raise ValueError(
            f"max_seq_length is {longest} but must be at least {least}: one token of a text, and {least - 1} special ones"
        )
    return Sentences(model, tokenizer, said, longest)


def sentence_transformer(
    folder_or_id: str | os.PathLike[str],
    *,
    normalize: bool = False,
    max_seq_length: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> "SentenceTransformer":
    """An encoder with ALiBi as a `sentence_transformers.SentenceTransformer`: encode, similarity, save, and train.

    Hidden states are pooled as the folder says (modules.json, 1_Pooling), by their mean where it says nothing. What `save` wrote
    loads with `SentenceTransformer(folder)` too, after `import alibi_attn.hf`.

    Args:
        normalize: vectors of length 1; without it what the folder says.
        max_seq_length: longer texts are cut. Default what the folder or the tokenizer says, else 8,192; ALiBi has no limit.
            `config.max_position_embeddings` is raised to it, on which nothing depends here, and which sentence-transformers
            takes for a limit when it loads.
        dtype: as `ALiBiBertModel.from_pretrained` has it.
        device: as SentenceTransformer has it; default a GPU where there is one.
        revision, cache_dir, token, local_files_only: for the hub.

    Raises:
        ImportError: sentence-transformers is not installed.
        OSError: neither a folder nor a repository, or files that are not there.
        ValueError: a damaged file, or a model, module or pooling of another kind, by name.
    """
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sentence_transformers":
            raise
        raise ImportError(
            'sentence_transformer needs sentence-transformers 6; install it with: pip install "alibi-attn[embed]"'
        ) from error
    found = load(
        folder_or_id, max_seq_length=max_seq_length, dtype=dtype, revision=revision, cache_dir=cache_dir, token=token,
        local_files_only=local_files_only,
    )  # fmt: skip
    said, config = found.folder, found.model.config
    config.max_position_embeddings = max(config.max_position_embeddings, found.max_seq_length)
    # Its Transformer reads a folder of ours with AutoModel: config and tokenizer from there, the weights from memory.
    with tempfile.TemporaryDirectory() as ours:
        config.save_pretrained(ours)
        found.tokenizer.save_pretrained(ours)
        transformer = modules.Transformer(
            ours,
            model_kwargs={"state_dict": found.model.state_dict(), "dtype": found.model.dtype},
            processor_kwargs={"model_max_length": found.max_seq_length},
        )
    transformer.config.name_or_path = str(folder_or_id)
    chain: list[torch.nn.Module] = [
        transformer,
        modules.Pooling(config.hidden_size, said.pooling, include_prompt=said.include_prompt),
    ]
    if normalize or said.normalize:
        chain.append(modules.Normalize())
    return SentenceTransformer(
        modules=chain,
        device=device,
        prompts=said.prompts,
        default_prompt_name=said.default_prompt_name,
        similarity_fn_name=said.similarity,  # type: ignore[arg-type]
        truncate_dim=said.truncate_dim,
    )


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Of a folder; in one sentence where there is none."""
    if not any(
        found for files in _VOCABULARIES for found in folder.glob(files)
    ):  # transformers would make an empty one
        raise FileNotFoundError(
            f"{folder} has no tokenizer, neither tokenizer.json nor a vocabulary; add it, or download it"
        )
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            parse(path.read_bytes())
        except JsonError as error:
            raise ValueError(f"{path} is damaged: {error}; download it again") from None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except _TOKENIZER_ERRORS as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ValueError(f"{folder} has no tokenizer that transformers can load ({said}); download it again") from error
