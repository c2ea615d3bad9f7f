"""Late chunking: one vector per passage, from one pass of the encoder over the whole document (arXiv:2409.04701).

The vector of a chunk is the mean of the last hidden states of its tokens, which have attended to the rest of the document. ALiBi
has no maximum length and its attention needs linear memory here, so a document of any length is one exact pass. Documents can
also be read in overlapping windows ("long late chunking", sec. 3.3). Read before: `chunking.py`, `embedding.py`.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from alibi_attn.hf.embedding import chunking, embedding, sentence_encoder
from alibi_attn.hf.embedding.chunking import Chunks, Spans
from alibi_attn.hf.embedding.embedding import Tokens
from alibi_attn.hf.readers import tokenizer_files
from alibi_attn.hf.readers.encoder.models import ALiBiBertModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@dataclasses.dataclass(frozen=True, repr=False)
class LateChunks:
    """The chunks of one text.

    Args:
        vectors: [C, E] float32.
        spans: [C, 2] int64, (start, end) of each chunk in characters.
    """

    vectors: NDArray[np.float32]
    spans: Spans

    def __repr__(self) -> str:
        count, size = self.vectors.shape
        return f"<LateChunks: {count:,} vectors of {size:,} numbers>"


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with its tokens and chunks.

    Args:
        ids: [N] all tokens, including special ones before and after the text.
        first, stop: the range of the text's own tokens.
        spans: [C, 2] of the chunks, in characters.
        tokens: [C, 2] of the chunks, in tokens counted from `first`.
    """

    ids: Tokens
    first: int
    stop: int
    spans: Spans
    tokens: Spans

    def __len__(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class Windows:
    """How to read documents that are longer than a window.

    Args:
        max_length: tokens of a window, special ones included; None reads every document in one pass.
        overlap: tokens that neighboring windows share.
    """

    max_length: int | None = None
    overlap: int = 512

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if a window cannot move forward."""
        if self.max_length is None:
            return
        room = self.max_length - tokenizer.num_special_tokens_to_add()
        if self.overlap < 0 or room <= self.overlap:
            raise ValueError(
                f"max_length is {self.max_length} with an overlap of {self.overlap}, but a window must have room for "
                f"{tokenizer.num_special_tokens_to_add()} special tokens and more than the overlap, which must be ≥ 0"
            )

    def split(self, document: Document) -> list[tuple[int, int, int, int]]:
        """(start, stop) of each window and (first, end) of the tokens whose states it provides, counted from `document.first`.

        Two windows share their overlap at its middle, so that each token has context on both sides.
        """
        length = document.stop - document.first
        room = length if self.max_length is None else self.max_length - (len(document) - length)
        if length <= room:
            return [(0, length, 0, length)]
        starts = [*range(0, length - room, room - self.overlap), length - room]
        edges = [0, *((start + before + room) // 2 for before, start in itertools.pairwise(starts)), length]
        return [(start, start + room, *edge) for start, edge in zip(starts, itertools.pairwise(edges), strict=True)]


def late_chunks(
    model: "SentenceTransformer | str | os.PathLike[str]",
    texts: Sequence[str],
    *,
    chunks: Chunks = 256,
    max_length: int | None = None,
    overlap: int = 512,
    normalize: bool = False,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[LateChunks]:
    """One vector per chunk of each text, computed with the whole text in view.

        vector of a chunk c = Σ_{t in c} h_t / |c| ,  h_t the last hidden state of token t in one pass over the whole text

    A token is in a chunk if they share a character; special tokens are in none. Short texts are batched, without padding.

    Use it to search passages whose meaning depends on the rest of the document; for separate texts `encode` is enough. The gain
    is small if the encoder was not trained for it.

    A common mistake: splitting documents first and passing the pieces as texts, which are then embedded alone.

    Args:
        model: from `sentence_transformer`, or a folder or repository for it. Its pooling must be the mean.
        texts: each must have at least one token.
        chunks: tokens per chunk; "sentences" (after . ! ? and white space) or "paragraphs" (at blank lines; one longer than
            20,000 characters is split at its lines, with a warning); a list of
            (start, end) spans in characters for each text; or a function from a text to such spans. Spans must not be empty, must
            be in order, and must not overlap; text outside of them is read but gets no vector.
        max_length: None reads each text in one exact pass, of any length, in linear memory. A number of tokens reads longer
            texts in windows of that length, which see less of the text.
        overlap: tokens that neighboring windows share.
        normalize: scale vectors to length 1; False leaves it to the model.
        batch_tokens: tokens per batch. A longer text is a separate batch.
        progress: called after each batch with (finished texts, all texts).

    Returns:
        For each text its vectors [C, E] and spans [C, 2]; C depends on the text.

    Raises:
        TypeError: texts or chunks of another type.
        ValueError: a text without tokens, invalid spans, another pooling than the mean, a window without room for its overlap,
            or vectors that are not finite.

    >>> from alibi_attn.hf import late_chunks, sentence_transformer
    >>> model = sentence_transformer("jinaai/jina-embeddings-v2-base-en")  # doctest: +SKIP
    >>> [passages] = late_chunks(model, [book], chunks="paragraphs")  # doctest: +SKIP

    Source: Günther et al. 2024, Late Chunking (arXiv:2409.04701).
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"texts is {chunking.short(texts)} but must be a list of strings; pass [text] for one text")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens} but must be at least 1")
    encoder = sentence_encoder.unpacked(model)
    windows = Windows(max_length, overlap)
    documents = prepared(encoder, texts, chunks, windows)
    normalize = normalize or encoder.folder.normalize
    found: dict[int, NDArray[np.float32]] = {}
    for indices, vectors in computed(encoder.model, documents, windows, batch_tokens=batch_tokens, normalize=normalize):
        found |= dict(zip(indices, vectors, strict=True))
        if progress is not None:
            progress(len(found), len(documents))
    return [LateChunks(found[at], document.spans) for at, document in enumerate(documents)]


def prepared(
    encoder: sentence_encoder.Sentences,
    texts: Sequence[str],
    chunks: Chunks,
    windows: Windows,
    *,
    names: Sequence[str] | None = None,
) -> list[Document]:
    """The tokens and chunks of all texts, after all checks.

    Args:
        names: of the texts, for errors; None for "text 0" and so on.

    Raises:
        TypeError, ValueError: see `late_chunks`.
    """
    settings, tokenizer = encoder.folder, encoder.tokenizer
    if settings.pooling != "mean":
        raise ValueError(
            f"the model pools by {settings.pooling!r} but late chunking is a mean of tokens; use a model with mean pooling"
        )
    if settings.default_prompt_name or settings.truncate_dim:
        raise ValueError("the model has a default prompt or truncated vectors, which late chunking does not support")
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not report the characters of its tokens; use a fast tokenizer"
        )
    chunking.check(chunks, len(texts))
    windows.check(tokenizer)
    return [
        _document(tokenizer, text, chunks, number, f"text {number}" if names is None else names[number])
        for number, text in enumerate(texts)
    ]


def computed(
    model: ALiBiBertModel,
    documents: Sequence[Document],
    windows: Windows,
    *,
    batch_tokens: int,
    normalize: bool,
    order: Sequence[int] | None = None,
) -> Iterator[tuple[list[int], list[NDArray[np.float32]]]]:
    """Yields (indices of documents, their vectors [C, E]), longest documents first.

    Args:
        order: the indices to compute, in this order; None for all.

    Raises:
        ValueError: see `embedding.hidden_states` and `embedding.finished`.
    """
    order = embedding.longest_first(documents) if order is None else order
    for indices in embedding.batches(documents, order, batch_tokens):
        means = _means(model, [documents[at] for at in indices], windows, batch_tokens)
        yield indices, [embedding.finished(model, mean, normalize=normalize) for mean in means]


@torch.inference_mode()
def _means(
    model: ALiBiBertModel, documents: Sequence[Document], windows: Windows, batch_tokens: int
) -> list[torch.Tensor]:
    """The mean of each chunk's tokens, [C, E] for each document, with the states of all its windows."""
    counts = [torch.from_numpy(document.tokens[:, 1] - document.tokens[:, 0]) for document in documents]
    sums = [torch.zeros(len(count), model.config.hidden_size, device=model.device) for count in counts]
    pieces = [(at, *window) for at, document in enumerate(documents) for window in windows.split(document)]
    rows = []
    for at, start, stop, *_ in pieces:
        ids, first = documents[at].ids, documents[at].first
        rows.append(np.concatenate([ids[:first], ids[first + start : first + stop], ids[documents[at].stop :]]))
    for indices in embedding.batches(rows, embedding.longest_first(rows), batch_tokens):
        states, _ = embedding.hidden_states(model, [rows[index] for index in indices])
        for row, index in zip(states, indices, strict=True):
            at, start, _, first, end = pieces[index]
            tokens = documents[at].tokens.clip(first, end)
            shift = documents[at].first - start
            for chunk in np.flatnonzero(tokens[:, 0] < tokens[:, 1]):
                low, high = tokens[chunk] + shift
                sums[at][chunk] += row[low:high].sum(0, dtype=torch.float32)
    return [total / count[:, None].to(total) for total, count in zip(sums, counts, strict=True)]


def _document(tokenizer: PreTrainedTokenizerBase, text: str, chunks: Chunks, number: int, name: str) -> Document:
    wanted = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    encoded = tokenizer_files.encoded(tokenizer, [text], [name], **wanted)
    inside = np.flatnonzero(np.asarray(encoded["special_tokens_mask"][0]) == 0)
    if not len(inside):
        raise ValueError(f"{name} has no tokens with this tokenizer; leave it out")
    first, stop = int(inside[0]), int(inside[-1]) + 1
    offsets = np.array(encoded["offset_mapping"][0], dtype=np.int64)[first:stop]
    spans, tokens = chunking.spans_of(text, chunks, offsets, number=number)
    return Document(np.asarray(encoded["input_ids"][0], dtype=np.int32), first, stop, spans, tokens)
