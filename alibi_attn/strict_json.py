"""Strict JSON: every JSON file from outside the package is read here, or rejected with a reason.

Python's reader accepts more than JSON (NaN, Infinity, a name twice, 1e999 as infinity, half of a surrogate pair) and can raise
three other exceptions: RecursionError for a file of brackets, ValueError for a number of thousands of digits, and
UnicodeDecodeError for bytes that are not text. Here every case is one error; the caller adds the file's name and the remedy.

Our own JSON files end with a hash of their content, so that a flipped bit is an error and not another number (`sealed`).
"""

import hashlib
import json
import math
from collections.abc import Mapping

DEEPEST = 50  # nested lists and objects; the package's own files have at most eight levels


class JsonError(ValueError):
    """The reason, without the name of the file."""


def parse(content: bytes) -> object:
    """The value of a JSON text (RFC 8259) in UTF-8, with numbers that fit a float and no duplicate names.

    Raises:
        JsonError: anything else.

    >>> parse(b'{"length": [128, 256]}')
    {'length': [128, 256]}
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise JsonError("it is empty")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise JsonError(str(error)) from None
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None
    _check_depth(value)
    if "\\u" in text:
        _check_texts(value)
    return value


def sealed(data: Mapping[str, object], *, indent: int | None = None) -> bytes:
    """The data as JSON, with its hash under "sha256"."""
    return json.dumps({**data, "sha256": _digest(data)}, indent=indent, sort_keys=True, allow_nan=False).encode()


def is_sealed(data: Mapping[str, object]) -> bool:
    """Whether the data has the hash that `sealed` gave it.

    >>> written = parse(sealed({"loss": 6.03}))
    >>> is_sealed(written), is_sealed({**written, "loss": 9.0})
    (True, False)
    """
    return data.get("sha256") == _digest({name: value for name, value in data.items() if name != "sha256"})


def _digest(data: Mapping[str, object]) -> str:
    text = json.dumps(data, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the name {twice!r} comes twice in one object")
    return found


def _integer(digits: str) -> int:
    _number(digits)
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        shown = digits if len(digits) < 30 else f"{digits[:10]}… ({len(digits)} characters)"
        raise JsonError(f"the number {shown} is too large")
    return value


def _constant(name: str) -> float:
    raise JsonError(f"{name} is not JSON; use null for values that were not measured")


def _check_depth(value: object) -> None:
    """Checks the depth without recursion, before other functions recurse into the value."""
    level, depth = [value], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise JsonError(_TOO_DEEP)
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]


def lone_surrogate(text: str) -> str:
    """The escape of the first half of a surrogate pair, which JSON can escape but no file can hold; "" if a text has none.

    >>> lone_surrogate("caf\\ud83d"), lone_surrogate("café")
    ('\\\\ud83d', '')
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return ""


def _check_texts(value: object) -> None:
    """Raises JsonError for half of a surrogate pair. `value` is not deep."""
    if isinstance(value, str):
        if half := lone_surrogate(value):
            raise JsonError(f"a text has {half}, {NO_CHARACTER}")
    elif isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_texts(inner)


NO_CHARACTER = "half of a surrogate pair and no character"
_TOO_DEEP = f"it nests more than {DEEPEST} lists and objects"
