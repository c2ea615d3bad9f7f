"""Which passages of many long documents answer a question, and where are they?

pip install ".[index]" in a clone
python examples/passages.py jinaai/jina-embeddings-v2-base-en "Who wrote the letter?" chapters/*.txt

Every passage is embedded with its whole document in view (late chunking). LanceDB, a database that runs inside this process,
stores the vectors in a folder and searches them. Run it again with another question: known documents are not embedded again.
"""

import argparse
from pathlib import Path

import lancedb

from alibi_attn.hf import late_chunks, sentence_transformer


def rows(file: Path, text: str, model: object, chunks: int | str) -> list[dict[str, object]]:
    """One row for each passage: its vector, its text, and its place in the file."""
    [passages] = late_chunks(model, [text], chunks=chunks, normalize=True)
    return [
        {"vector": vector, "text": text[start:end], "file": str(file), "start": int(start), "end": int(end)}
        for vector, (start, end) in zip(passages.vectors, passages.spans, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or the name of a repository")
    parser.add_argument("question")
    parser.add_argument("files", nargs="*", type=Path, help="text files in UTF-8")
    parser.add_argument("--chunks", default="sentences", help="sentences, paragraphs, or tokens per passage")
    parser.add_argument("--best", type=int, default=3, help="passages to print")
    parser.add_argument("--database", default="passages.lancedb", help="a folder, for one model")
    options = parser.parse_args()

    model = sentence_transformer(options.model, normalize=True)
    database = lancedb.connect(options.database)
    stored = database.open_table("passages") if "passages" in database.table_names() else None
    known = set() if stored is None else set(stored.to_arrow()["file"].to_pylist())
    chunks = int(options.chunks) if options.chunks.isdecimal() else options.chunks
    for file in options.files:
        if str(file) not in known:
            found = rows(file, file.read_text(encoding="utf-8"), model, chunks)
            if stored is None:
                stored = database.create_table("passages", found)
            else:
                stored.add(found)
    query = model.encode([options.question])[0]
    for passage in stored.search(query).distance_type("cosine").limit(options.best).to_list():
        place = f"{passage['file']}:{passage['start']}-{passage['end']}"
        print(f"{1 - passage['_distance']:.3f}  {place}  {' '.join(passage['text'].split())}")


if __name__ == "__main__":
    main()
