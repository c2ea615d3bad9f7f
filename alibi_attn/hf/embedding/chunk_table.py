"""Writes chunks and their vectors as a Parquet table: file, start, end, text, vector. Needs pyarrow, of the extra `index`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from alibi_attn.hf.embedding.chunking import Spans

ROWS = 8192  # per row group


def write(
    path: Path | BinaryIO,
    names: Sequence[str],
    texts: Sequence[str],
    spans: Sequence[Spans],
    vectors: NDArray[np.float32],
    *,
    first_characters: Sequence[int] | None = None,
    metadata: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write one row per chunk, in the order of the texts.

    Args:
        names: of the files.
        spans: [C, 2] for each text.
        vectors: [sum of C, E].
        first_characters: the place of each text in its file, which the columns start and end count from; None for 0.
        metadata: of the file.
    """
    width = vectors.shape[1]
    columns = {"file": pa.string(), "start": pa.int64(), "end": pa.int64(), "text": pa.string()}
    schema = pa.schema([*columns.items(), ("vector", pa.list_(pa.float32(), width))], metadata=metadata)
    owners = np.repeat(np.arange(len(texts)), [len(rows) for rows in spans])
    places = np.concatenate(spans)
    origins = np.zeros(len(texts), np.int64) if first_characters is None else np.asarray(first_characters, np.int64)
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for first in range(0, len(vectors), ROWS):
            some = slice(first, first + ROWS)
            starts, ends = places[some].T
            parts = [texts[at][start:end] for at, start, end in zip(owners[some], starts, ends, strict=True)]
            origin = origins[owners[some]]
            flat = pa.array(np.ascontiguousarray(vectors[some]).ravel())
            table = [
                [names[at] for at in owners[some]],
                starts + origin,
                ends + origin,
                parts,
                pa.FixedSizeListArray.from_arrays(flat, width),
            ]
            writer.write_table(pa.table([*map(pa.array, table[:4]), table[4]], schema=schema))


def read_metadata(path: Path) -> dict[bytes, bytes]:
    """The metadata of a table, after its pages have been compared with their checksums.

    Raises:
        ValueError: it is damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
            return dict(file.schema_arrow.metadata or {})
    except (pa.ArrowException, OSError) as error:  # damaged pages are an OSError without a number
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} is damaged; delete it, and start again") from None
