"""What `alibi embed` computes, on one machine or on a cluster: the rows of its output, from texts or from their passages.

Read before: `embedding.py`, `late_chunking.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from alibi_attn.hf.embedding import embedding, late_chunking, sentence_encoder
from alibi_attn.hf.embedding.chunking import Spans


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a command.

    Args:
        model: a folder, which with a cluster exists on every machine, or a repository on the Hugging Face Hub.
        chunks: tokens per passage, "sentences" or "paragraphs"; None embeds whole texts.
        max_length, overlap, batch_tokens, normalize: as for `late_chunks`; without `chunks`, longer texts are cut.
        dtype: name of a torch dtype, or "int8" or "float8".
        device: of torch.
    """

    model: str
    chunks: int | Literal["sentences", "paragraphs"] | None
    max_length: int | None
    overlap: int
    batch_tokens: int
    normalize: bool
    dtype: str
    device: str

    def loaded(self) -> sentence_encoder.Sentences:
        """The encoder, which needs no prompt."""
        longest = self.max_length if self.chunks is None else None
        sentences = sentence_encoder.load(self.model, max_seq_length=longest, dtype=self.dtype, device=self.device)
        if sentences.folder.default_prompt_name or sentences.folder.truncate_dim:
            raise ValueError(
                f"{self.model} needs a prompt or truncated vectors, which this command does not support; use "
                "alibi_attn.hf.sentence_transformer"
            )
        return sentences


@dataclasses.dataclass(frozen=True)
class Job:
    """The rows of an output.

    Args:
        spans: [C, 2] of the rows of each text, in characters.
        lengths: the number of tokens of each text.
        cut: the number of texts that were cut.
        order: the rows, in the order of computation.
        batches: given the number of finished rows, yields vectors of the next ones.
        identity: what `embedding.fingerprint` hashes in addition to the model: arrays and settings.
    """

    spans: list[Spans]
    lengths: list[int]
    cut: int
    order: list[int]
    batches: Callable[[int], Iterator[NDArray[np.float32]]]
    identity: tuple[list[NDArray[np.int32]], list[object]]


def of(sentences: sentence_encoder.Sentences, settings: Settings, texts: Sequence[str], names: Sequence[str]) -> Job:
    """One row per text, or per passage in the order of the texts and inside them. Computes nothing yet.

    Args:
        names: of the texts, for errors.

    Raises:
        ValueError: a text without tokens, or as for `late_chunking.prepared`.
    """
    if settings.chunks is None:
        return _of_texts(sentences, settings, texts, names)
    batch_tokens, normalize = settings.batch_tokens, settings.normalize or sentences.folder.normalize
    windows = late_chunking.Windows(settings.max_length, settings.overlap)
    documents = late_chunking.prepared(sentences, texts, settings.chunks, windows, names=names)
    counts = [len(document.spans) for document in documents]
    first, order = [0, *np.cumsum(counts).tolist()], embedding.longest_first(documents)

    def batches(done: int) -> Iterator[NDArray[np.float32]]:
        skipped = int(np.searchsorted(np.cumsum([counts[at] for at in order]), done, "right")) if done else 0
        rest: Any = {"order": order[skipped:], "batch_tokens": batch_tokens, "normalize": normalize}
        for _, vectors in late_chunking.computed(sentences.model, documents, windows, **rest):
            yield np.concatenate(vectors)

    spans = [document.spans for document in documents]
    arrays = [array for document in documents for array in (document.ids, document.spans.astype(np.int32).ravel())]
    rows = [row for at in order for row in range(first[at], first[at + 1])]
    identity = arrays, ["chunks", str(settings.chunks), windows, normalize]
    return Job(spans, [len(document) for document in documents], 0, rows, batches, identity)


def _of_texts(
    sentences: sentence_encoder.Sentences, settings: Settings, texts: Sequence[str], names: Sequence[str]
) -> Job:
    rows, cut = embedding.tokenize(sentences.tokenizer, texts, sentences.max_seq_length)
    for name, row in zip(names, rows, strict=True):
        if not len(row):
            raise ValueError(f"{name} has no tokens with this tokenizer; leave it out")
    order, pooling = embedding.longest_first(rows), sentences.folder.pooling
    normalize = settings.normalize or sentences.folder.normalize

    def batches(done: int) -> Iterator[NDArray[np.float32]]:
        for indices in embedding.batches(rows, order[done:], settings.batch_tokens):
            some = [rows[index] for index in indices]
            yield embedding.embed(sentences.model, some, pooling=pooling, normalize=normalize)

    spans = [np.array([[0, len(text)]], dtype=np.int64) for text in texts]
    return Job(spans, list(map(len, rows)), len(cut), order, batches, (rows, [pooling, normalize]))
