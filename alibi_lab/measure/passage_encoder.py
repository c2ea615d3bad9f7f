"""A small encoder for passages of books, trained in minutes on one core: masked tokens first, then sentences and their passages.

Sentences are removed from a stretch of a book, and each must be assigned to the chunk from which it was removed, among the
chunks of several stretches. The chunks are embedded alone, or late: each as the mean of its tokens after one pass over its
stretch (`hf/embedding/late_chunking.py`). Read next: `passage_search.py`, which tests both on other books.
"""

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from alibi_attn.files import new_file, new_folder, replace_file
from alibi_attn.hf import ALiBiBertConfig, ALiBiBertForMaskedLM, ALiBiBertModel
from alibi_attn.hf.embedding import chunking
from alibi_lab.measure.harness import Say
from alibi_lab.measure.peers.dense_encoder import Sizes

Trained = Literal["alone", "late"]
Tokens = NDArray[np.int64]
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = range(4)
SENTENCE = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)[\"'”’]? (?=[\"'“‘]?[A-Z])")
WORDS = (8, 40)  # of a sentence that may be removed
SAVED_EVERY = 25  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of the encoder and of its training. Stretches are in characters, chunks in tokens.

    Args:
        batch: stretches per step.
        removed: sentences removed from each stretch.
    """

    width: int = 128
    layers: int = 3
    heads: int = 4
    inner: int = 256
    vocabulary: int = 8192
    stretch: int = 4000
    chunk: int = 64
    batch: int = 6
    removed: int = 10
    masked_share: float = 0.3
    masked_steps: int = 200
    pair_steps: int = 1500
    temperature: float = 0.05
    learning_rate: float = 1e-3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Question:
    """A removed sentence, and the character of the remaining text at which it was."""

    text: str
    place: int


def questions(text: str, count: int, random: np.random.Generator) -> tuple[str, list[Question]]:
    """The text without up to `count` of its sentences, and these. Its first and last sentence, which may be cut, are left out."""
    sentences = SENTENCE.split(text)[1:-1]
    fitting = [at for at, words in enumerate(sentences) if WORDS[0] <= len(words.split()) <= WORDS[1]]
    removed = set(random.choice(fitting, min(count, len(fitting)), replace=False).tolist()) if fitting else set()
    rest, found = "", []
    for at, sentence in enumerate(sentences):
        if at in removed:
            found.append(Question(sentence, len(rest)))
        else:
            rest += f"{sentence} "
    return rest, found


def stretches(books: Sequence[str], size: int, count: int, random: np.random.Generator) -> list[str]:
    """Pieces of random books, of `size` characters or of a whole shorter book."""
    chosen = random.integers(0, len(books), count)
    starts = [int(random.integers(0, max(1, len(books[at]) - size))) for at in chosen]
    return [books[at][start : start + size] for at, start in zip(chosen, starts, strict=True)]


def byte_pairs(texts: Sequence[str], size: int) -> Tokenizer:
    """A byte-level BPE of `size` tokens, trained on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    frame = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=None, special_tokens=ends)
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame])
    return bpe


def trained_encoder(books: Sequence[str], setup: Setup, trained: Trained, folder: Path, *, say: Say) -> Path:
    """Trains an encoder, or resumes an interrupted training, and returns the folder that `alibi embed` can read.

    Every step draws its own random numbers from the seed and its index, so an interruption changes nothing.

    Args:
        trained: how the chunks of the second stage are embedded. Both kinds share the first stage.
    """
    digests = (hashlib.sha256(book.encode()).digest() for book in books)
    place = folder / hashlib.sha256(repr(setup).encode() + b"".join(digests)).hexdigest()[:12]
    if (place / trained).exists():
        return place / trained
    training = _Training(ALiBiBertForMaskedLM(_config(setup)), _tokenizer(books, setup, place), books, setup)
    stages: list[tuple[str, Callable[[np.random.Generator], Tensor], int]] = [
        ("masked", training.masked_loss, setup.masked_steps),
        (trained, functools.partial(training.pair_loss, trained), setup.pair_steps),
    ]
    for number, (name, loss_of, steps) in enumerate(stages):
        for step, loss in training.steps(loss_of, steps, place / f"{name}.pt", number):
            say(f"{name} {step}/{steps}, {loss:.3f} nats")
    with new_folder(place / trained) as unfinished:
        training.model.bert.eval().save_pretrained(unfinished)  # type: ignore[no-untyped-call]
        training.words.save_pretrained(unfinished)
    return place / trained


def chunk_tokens(words: PreTrainedTokenizerFast, text: str, size: int) -> tuple[Tokens, NDArray[np.int64]]:
    """(tokens without special ones, spans [C, 2] of its chunks in characters)."""
    encoded = words(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64)
    return np.asarray(encoded["input_ids"], dtype=np.int64), chunking.spans_of(text, size, offsets, number=0)[0]


def _tokenizer(books: Sequence[str], setup: Setup, place: Path) -> PreTrainedTokenizerFast:
    path = place / "tokenizer.json"
    if not path.exists():
        replace_file(path, byte_pairs(books, setup.vocabulary).to_str().encode())
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **names)  # type: ignore[no-untyped-call]


def _config(setup: Setup) -> ALiBiBertConfig:
    torch.manual_seed(setup.seed)
    sizes = Sizes(setup.layers, setup.width, setup.heads, setup.inner, setup.vocabulary)
    return ALiBiBertConfig(**sizes.of_transformers, pooler=False, hidden_dropout_prob=0.0)


@dataclasses.dataclass(frozen=True)
class _Training:
    """A model that is trained on books, with its tokenizer."""

    model: ALiBiBertForMaskedLM
    words: PreTrainedTokenizerFast
    books: Sequence[str]
    setup: Setup

    def steps(
        self, loss_of: Callable[[np.random.Generator], Tensor], steps: int, path: Path, stage: int
    ) -> Iterator[tuple[int, float]]:
        """Trains a stage and yields (steps, loss) whenever it has saved it.

        The rate rises over a tenth of the steps and falls to 0 as a cosine.
        """
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.setup.learning_rate, weight_decay=0.01)
        first = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
        self.model.train()
        warm_up = max(1, steps // 10)
        for step in range(first, steps):
            rate = min((step + 1) / warm_up, (1 + math.cos(math.pi * step / steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = self.setup.learning_rate * rate
            loss = loss_of(np.random.default_rng((self.setup.seed, stage, step)))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            if (step + 1) % SAVED_EVERY == 0 or step + 1 == steps:
                state = {"model": self.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                with new_file(path, replace=True) as file:
                    torch.save(state, file)
                yield step + 1, loss.item()

    def masked_loss(self, random: np.random.Generator) -> Tensor:
        """The cross-entropy of masked tokens of some stretches."""
        texts = stretches(self.books, self.setup.stretch, self.setup.batch, random)
        ids, mask = padded([np.asarray(row, dtype=np.int64) for row in self.words(texts)["input_ids"]])
        drawn = torch.from_numpy(random.random(ids.shape) < self.setup.masked_share)
        hidden = drawn & (ids >= len(SPECIAL))
        states = self.model.bert(ids.masked_fill(hidden, MASK), mask).last_hidden_state
        return F.cross_entropy(self.model.cls["predictions"](states[hidden]), ids[hidden])

    def pair_loss(self, trained: Trained, random: np.random.Generator) -> Tensor:
        """The cross-entropy of assigning each removed sentence to its chunk, among the chunks of all stretches."""
        sentences: list[Tokens] = []
        right: list[int] = []
        stretched: list[Tokens] = []
        ranges: list[NDArray[np.int64]] = []
        chunks = 0
        for text in stretches(self.books, self.setup.stretch, self.setup.batch, random):
            rest, found = questions(text, self.setup.removed, random)
            if not found:
                continue
            ids, spans = chunk_tokens(self.words, rest, self.setup.chunk)
            places = [question.place for question in found]
            right += (chunks + np.searchsorted(spans[:, 1], places, "right").clip(max=len(spans) - 1)).tolist()
            texts = [question.text for question in found]
            sentences += map(np.asarray, self.words(texts, add_special_tokens=False)["input_ids"])
            stretched.append(ids)
            edges = np.minimum(np.arange(len(spans) + 1) * self.setup.chunk, len(ids))
            ranges.append(np.stack([edges[:-1], edges[1:]], axis=1))
            chunks += len(spans)
        queries = means(self.model.bert, sentences)
        if trained == "alone":
            parts = [ids[start:end] for ids, some in zip(stretched, ranges, strict=True) for start, end in some]
            candidates = means(self.model.bert, parts)
        else:
            candidates = means(self.model.bert, stretched, ranges)
        scores = queries @ candidates.T / self.setup.temperature
        return F.cross_entropy(scores, torch.tensor(right))


def means(model: ALiBiBertModel, rows: Sequence[Tokens], ranges: Sequence[NDArray[np.int64]] | None = None) -> Tensor:
    """Unit vectors [C, E]: the means of the hidden states of ranges of tokens, or of each row, without special tokens."""
    ranges = [np.array([[0, len(row)]]) for row in rows] if ranges is None else ranges
    ids, mask = padded([np.concatenate([[CLS], row, [SEP]]) for row in rows])
    states = model(ids, mask).last_hidden_state
    spans = np.concatenate([some + 1 + at * ids.shape[1] for at, some in enumerate(ranges)])
    places = np.concatenate([np.arange(start, end) for start, end in spans])
    owners = np.repeat(np.arange(len(spans)), spans[:, 1] - spans[:, 0])
    picked = states.flatten(0, 1)[torch.from_numpy(places)]
    sums = picked.new_zeros(len(spans), picked.shape[1]).index_add(0, torch.from_numpy(owners), picked)
    return F.normalize(sums, dim=1)


def padded(rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """(ids, mask), each [B, T]."""
    ids = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()
