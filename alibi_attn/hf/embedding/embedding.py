"""Embeds many texts: tokenize once, then batches of similar length, longest first.

A batch is a padded array, but the model computes only its tokens (`encoder/packing.py`); sorted by length, little is padded.
"""

import hashlib
from collections.abc import Iterator, Sequence, Sized

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from alibi_attn.hf.embedding.pooling_config import Pooling
from alibi_attn.hf.readers import tokenizer_files
from alibi_attn.hf.readers.encoder.models import ALiBiBertModel
from alibi_attn.nn.device import checked_device

Tokens = NDArray[np.int32]
_AT_ONCE = 256  # texts per call of the tokenizer


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> tuple[list[Tokens], list[int]]:
    """The tokens of each text, special ones included, at most `max_length`; and the indices of the texts that were cut."""
    rows: list[Tokens] = []
    cut: list[int] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = list(texts[start : start + _AT_ONCE])
        names = [f"text {start + at}" for at in range(len(some))]
        encoded = tokenizer_files.encoded(tokenizer, some, names)["input_ids"]
        for at, ids in enumerate(encoded):
            if len(ids) > max_length:
                cut.append(start + at)
                ids = tokenizer(some[at], add_special_tokens=True, truncation=True, max_length=max_length)["input_ids"]
            rows.append(np.asarray(ids, dtype=np.int32))
    return rows, cut


def longest_first(rows: Sequence[Sized]) -> list[int]:
    """The order of computation: longest text first, equal lengths in their original order."""
    return sorted(range(len(rows)), key=lambda at: -len(rows[at]))


def batches(rows: Sequence[Sized], order: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Splits texts, in the given order, into batches of at most `batch_tokens` tokens with padding, or of a single text.

    >>> rows = [np.zeros(n, np.int32) for n in (2, 7, 3, 2)]
    >>> list(batches(rows, longest_first(rows), 7))
    [[1], [2, 0], [3]]
    """
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // max(1, len(rows[order[start]])))
        yield list(order[start : start + count])
        start += count


@torch.inference_mode()
def embed(model: ALiBiBertModel, rows: Sequence[Tokens], *, pooling: Pooling, normalize: bool) -> NDArray[np.float32]:
    """The vectors [B, E] of a batch of texts, each of at least one token.

    Raises:
        ValueError: the batch does not fit into memory, or a vector is not finite.
    """
    states, mask = hidden_states(model, rows)
    # Hidden states at padding are 0, so the sum covers only the tokens.
    vectors = states.sum(1, dtype=torch.float32) / mask.sum(1, keepdim=True) if pooling == "mean" else states[:, 0]
    return finished(model, vectors, normalize=normalize)


def hidden_states(model: ALiBiBertModel, rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """The last hidden states of a batch [B, T, E], 0 at padding, and its mask [B, T].

    Raises:
        ValueError: the batch does not fit into memory.
    """
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.from_numpy(row)
        mask[at, : len(row)] = 1
    mask = mask.to(model.device)
    try:
        return model(ids.to(model.device), mask).last_hidden_state, mask
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        raise ValueError(
            f"a batch of {len(rows)} × {longest:,} tokens does not fit into memory; use fewer tokens per batch, or cut texts"
        ) from error


def finished(model: ALiBiBertModel, vectors: Tensor, *, normalize: bool) -> NDArray[np.float32]:
    """Pooled vectors as float32 on the CPU.

    Raises:
        ValueError: a vector is not finite.
    """
    vectors = vectors.float()
    if normalize:
        vectors = F.normalize(vectors, dim=1)
    if not bool(torch.isfinite(vectors).all()):
        name = model.config.name_or_path or "the model"
        raise ValueError(
            f"{name} computed numbers that are not finite in {model.dtype}; use float32, or check its weights"
        )
    return vectors.cpu().numpy()


def move(model: ALiBiBertModel, device: str) -> None:
    """Moves a model to a device.

    Raises:
        ValueError: this machine does not have it, or it does not support the model's int8 or float8.
    """
    checked_device(device)
    try:
        model.to(device)  # type: ignore[arg-type]
    except RuntimeError as error:  # such as too little memory
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {device!r} but it cannot be used here ({reason})") from None


def fingerprint(model: ALiBiBertModel, rows: Sequence[Tokens], settings: Sequence[object]) -> str:
    """A hash of the model, the tokens and the settings: 32 hexadecimal digits."""
    config = model.config
    digest = hashlib.sha256(repr([*settings, *(getattr(config, name) for name in _FIELDS)]).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.tobytes())
    return digest.hexdigest()[:32]


_FIELDS = ("num_attention_heads", "gate_act", "gate", "qk_norm", "extra_norm", "layer_norm_eps")  # the rest are shapes
