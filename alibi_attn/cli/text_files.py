"""The text files that a command reads: their texts, whole or line by line, with the place of each."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from alibi_attn.cli.console import check_name


@dataclasses.dataclass(frozen=True)
class Text:
    """A text with its place.

    Args:
        name: for messages.
        start: its first character in the file.
    """

    name: str
    file: str
    start: int
    text: str


def read_texts(files: Sequence[Path], *, lines: bool) -> list[Text]:
    """The texts of the files, one per file or one per line.

    Raises:
        OSError: a file does not exist or cannot be read.
        ValueError: a file is empty, its text or name is not UTF-8, or, with `lines`, a line is empty.
    """
    found: list[Text] = []
    for path in files:
        check_name(path)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; pass text files")
        content = path.read_bytes()
        if b"\0" in content:
            raise ValueError(f"{path} is a binary file (it has zero bytes); pass text files")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is invalid; save it as UTF-8") from None
        if not text.strip():
            raise ValueError(f"{path} is empty; pass files with text")
        if not lines:
            found.append(Text(str(path), str(path), 0, text))
            continue
        start = 0
        for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            if not line.strip():
                raise ValueError(
                    f"{path} has no text in line {number}; delete the line, because every line becomes a row"
                )
            found.append(Text(f"line {number} of {path}", str(path), start, line.removesuffix("\r")))
            start += len(line) + 1
    return found
