"""Embeds many texts on many machines with Ray Data: one Parquet file per shard of the texts.

A shard is a run of consecutive texts. Each worker is an actor that holds the model; it returns a shard's table as a Parquet file,
which this process writes atomically. A file names the model, texts and settings that made it, so a second run skips the files
that exist. If a worker dies, Ray starts another one and repeats its shards. Read before: `job.py`.
"""

import collections
import contextlib
import dataclasses
import hashlib
import io
import itertools
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError

from alibi_attn.files import locked, replace_file
from alibi_attn.hf.embedding import chunk_table, embedding, job, resumable_output, sentence_encoder
from alibi_attn.hf.embedding.job import Settings

SHARD_CHARACTERS = 2**20  # about 250,000 tokens
ATTEMPTS = 4  # of a shard whose workers die
_IDENTITY = b"alibi_attn.identity"
_PART = re.compile(r"part-(\d{6})\.parquet")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts with their positions in files.

    Args:
        files: the file of each text.
        starts: the text's first character in its file.
    """

    files: Sequence[str]
    starts: Sequence[int]
    texts: Sequence[str]

    def __getitem__(self, some: slice) -> "Texts":
        return Texts(self.files[some], self.starts[some], self.texts[some])


@dataclasses.dataclass(frozen=True)
class Embedded:
    """The totals of all parts.

    Args:
        rows, width: of the vectors.
        tokens: computed by this call, without those of parts that existed.
        cut: number of texts that this call cut to the longest length.
    """

    parts: list[Path]
    rows: int
    width: int
    tokens: int
    cut: int


def embed(
    texts: Texts,
    settings: Settings,
    out: Path,
    *,
    workers: int | None = None,
    shard_characters: int = SHARD_CHARACTERS,
    on_resume: Callable[[int, int], None] = lambda done, shards: None,
    on_shard: Callable[[int, int], None] = lambda done, shards: None,
) -> Embedded:
    """Writes the folder `out`, with a file part-000000.parquet and so on for each shard, on the connected Ray cluster.

    The columns are file, start, end, text and vector, as `chunk_table.write` writes them; the rows are in the order of the texts.

    Args:
        workers: number of processes that hold the model. Default: one per machine, or one per GPU with device "cuda".
        shard_characters: as for `split`.
        on_resume: called once, with the number of existing parts and the number of all shards.
        on_shard: called with the same numbers after each shard.

    Raises:
        FileExistsError: `out` has parts of another model, other texts or other settings, or another process writes it.
        ValueError: a damaged part, settings that do not fit the model or the cluster, vectors that are not finite, or a
            shard whose worker died each time.
        ChildProcessError: Ray cannot start or restart workers.
        OSError: a file cannot be written.
    """
    identity = _identity(_loaded(settings), settings)
    shards = split(texts, shard_characters)
    with _claimed(out):
        names = [out / f"part-{number:06}.parquet" for number in range(len(shards))]
        identities = [_shard_identity(identity, shard) for shard in shards]
        _check_parts(out, names, identities)
        missing = [number for number, path in enumerate(names) if not path.exists()]
        work = [{"number": n, "identity": identities[n], **dataclasses.asdict(shards[n])} for n in missing]
        done, tokens, cut = len(names) - len(missing), 0, 0
        on_resume(done, len(names))
        for row in _computed(work, identity, settings, workers):
            replace_file(names[row["number"]], row["part"])
            tokens, cut, done = tokens + row["tokens"], cut + row["cut"], done + 1
            on_shard(done, len(names))
    metadata = [pq.read_metadata(path) for path in names]
    width = pq.read_schema(names[0]).field("vector").type.list_size
    return Embedded(names, sum(one.num_rows for one in metadata), width, tokens, cut)


def split(texts: Texts, characters: int = SHARD_CHARACTERS) -> list[Texts]:
    """The shards: consecutive texts; each ends at the text that reaches `characters`. The cluster does not change them."""
    edges, size = [0], 0
    for number, text in enumerate(texts.texts, 1):
        size += len(text)
        if size >= characters or number == len(texts.texts):
            edges.append(number)
            size = 0
    return [texts[start:stop] for start, stop in itertools.pairwise(edges)]


def _computed(
    work: list[dict[str, Any]], identity: str, settings: Settings, workers: int | None
) -> Iterator[dict[str, Any]]:
    """The results of these shards, in the order in which they finish."""
    if not work:
        return
    count, threads = _resources(settings, workers)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    data = ray.data.from_items(work, override_num_blocks=len(work)).map_batches(
        _Worker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(count, len(work)), max_tasks_in_flight_per_actor=2),
        fn_constructor_args=(settings, identity, threads, ray.remote(num_cpus=0)(_Attempts).remote()),
        **({"num_gpus": 1} if settings.device == "cuda" else {"num_cpus": threads}),
    )
    try:
        for row in data.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            yield row
    except RayError as error:
        raise ChildProcessError(
            f"the workers cannot continue ({str(error).strip().splitlines()[-1]}); the finished parts are kept"
        ) from error


def _resources(settings: Settings, workers: int | None) -> tuple[int, int]:
    """The number of workers, and the threads of each.

    Raises:
        ValueError: the cluster has too few GPUs or processors.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    per_node = [int(node.get("GPU" if settings.device == "cuda" else "CPU", 0)) for node in nodes]
    most = sum(per_node)
    if workers is None:
        workers = most if settings.device == "cuda" else sum(count > 0 for count in per_node)
    if not 1 <= workers <= most:
        unit = "GPUs" if settings.device == "cuda" else "processors"
        raise ValueError(f"workers is {workers} but the cluster has {most} {unit}; pass 1 to {most}, or add machines")
    if settings.device == "cuda":
        return workers, 1
    threads = min(count for count in per_node if count)
    while sum(count // threads for count in per_node) < workers:
        threads -= 1
    return workers, threads


class _Attempts:
    """An actor that counts how often each shard was begun, because Ray Data repeats the work of dead workers forever."""

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()

    def begin(self, number: int) -> int:
        self.counts[number] += 1
        return self.counts[number]


class _Worker:
    """An actor that holds the model."""

    def __init__(self, settings: Settings, identity: str, threads: int, attempts: Any) -> None:
        torch.set_num_threads(threads)
        self.settings, self.attempts, self.error = settings, attempts, ""
        try:
            self.sentences = _loaded(settings)
            if _identity(self.sentences, settings) != identity:
                raise ValueError(f"{settings.model} has other weights, settings or another tokenizer than at the start")
            embedding.move(self.sentences.model, settings.device)
        except (OSError, ValueError) as error:
            self.error = f"on {socket.gethostname()}: {error}"

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        number, identity = int(batch["number"][0]), str(batch["identity"][0])
        part, tokens, cut, error = b"", 0, 0, self.error
        if ray.get(self.attempts.begin.remote(number)) > ATTEMPTS:
            error = (
                f"part {number}, texts of {batch['files'][0][0]} and others, killed its worker {ATTEMPTS} times, most likely "
                "because memory ran out; pass fewer tokens per batch or fewer workers, and run the command again to continue"
            )
        if not error:
            some = Texts(list(batch["files"][0]), list(map(int, batch["starts"][0])), list(batch["texts"][0]))
            try:
                part, tokens, cut = _computed_part(self.sentences, some, self.settings, identity)
            except ValueError as found:
                error = str(found)
        return {"number": [number], "part": [part], "tokens": [tokens], "cut": [cut], "error": [error]}


def _loaded(settings: Settings) -> sentence_encoder.Sentences:
    sentences = settings.loaded()
    if settings.chunks is None and sentences.max_seq_length > settings.batch_tokens:
        raise ValueError(
            f"a text may have {sentences.max_seq_length:,} tokens but a batch holds {settings.batch_tokens:,}; raise the tokens "
            "per batch, or cut texts"
        )
    return sentences


def _computed_part(
    sentences: sentence_encoder.Sentences, some: Texts, settings: Settings, identity: str
) -> tuple[bytes, int, int]:
    """A shard's Parquet file, the number of its tokens, and the number of texts that were cut."""
    names = [f"a text of {file}" for file in some.files] if settings.chunks is None else some.files
    made = job.of(sentences, settings, some.texts, names)
    vectors, done = np.empty((len(made.order), sentences.model.config.hidden_size), np.float32), 0
    for rows in made.batches(0):
        vectors[made.order[done : done + len(rows)]] = rows
        done += len(rows)
    file, about = io.BytesIO(), {_IDENTITY: identity.encode()}
    chunk_table.write(file, some.files, some.texts, made.spans, vectors, first_characters=some.starts, metadata=about)
    return file.getvalue(), sum(made.lengths), made.cut


def _identity(sentences: sentence_encoder.Sentences, settings: Settings) -> str:
    """A hash of everything that affects the vectors: the model, its tokenizer and the settings."""
    tokenizer = sentences.tokenizer
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    normalize = settings.normalize or sentences.folder.normalize
    length = (settings.max_length, settings.overlap) if settings.chunks else sentences.max_seq_length
    about = ["parts", settings.chunks, length, normalize, sentences.folder.pooling, settings.dtype, words]
    return embedding.fingerprint(sentences.model, [], about)


def _shard_identity(identity: str, shard: Texts) -> str:
    digest = hashlib.sha256(identity.encode())
    for file, start, text in zip(shard.files, shard.starts, shard.texts, strict=True):
        for word in (file, str(start), text):
            digest.update(len(word).to_bytes(8, "little"))
            digest.update(word.encode())
    return digest.hexdigest()[:32]


def _check_parts(out: Path, names: Sequence[Path], identities: Sequence[str]) -> None:
    """Raises FileExistsError or ValueError if the folder has other parts, or damaged ones."""
    found = {path for path in out.iterdir() if _PART.fullmatch(path.name)}
    if more := sorted(found - {*names}):
        raise FileExistsError(
            f"{more[0]} is a part of a run with more texts; pass the same texts, delete it, or pass another --out"
        )
    for path, identity in zip(names, identities, strict=True):
        if path not in found:
            continue
        if chunk_table.read_metadata(path).get(_IDENTITY) != identity.encode():
            raise FileExistsError(
                f"{path} was made with another model, other texts or other settings; pass the same ones, delete it, or pass "
                "another --out"
            )


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Reserves the folder for this process; the system releases it if the process is killed.

    Folders that are new are removed if no part was written.

    Raises:
        FileExistsError: another process writes it.
        OSError: it is a file, or cannot be created.
    """
    lock, busy = out / ".lock", f"another process is writing {out}; wait for it, or pass another --out"
    with resumable_output.folder_for_output(out), locked(lock, busy):
        try:
            yield
        finally:
            if not any(out.glob("part-*")):
                lock.unlink(missing_ok=True)
