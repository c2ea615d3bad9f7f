"""Strict JSON: valid JSON is read, and everything else raises one error with a reason."""

import contextlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_attn.strict_json import DEEPEST, JsonError, parse

PLAIN = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.text()
VALUES = PLAIN | st.floats(allow_nan=False, allow_infinity=False)
# Invalid JSON, and Python's extensions of it; that a reader uses this parser shows by a name that comes twice.
DAMAGED = {
    "empty": (b"", "it is empty"),
    "white": (b" \n", "it is empty"),
    "cut": (b'{"schema": 1, ', "Expecting property name"),
    "not UTF-8": (b'{"schema": "\xff"}', "byte 12 is not UTF-8"),
    "deep lists": (b"[" * 100_000, "it nests more than 50 lists and objects"),
    "deep objects": (b'{"schema":' * 900 + b"1" + b"}" * 900, "it nests more than 50 lists and objects"),
    "many digits": (b'{"schema": ' + b"9" * 6000 + b"}", r"the number 9999999999… \(6000 characters\) is too large"),
    "huge exponent": (b'{"schema": -1e999}', "the number -1e999 is too large"),
    "NaN": (b'{"schema": NaN}', "NaN is not JSON"),
    "Infinity": (b'{"schema": -Infinity}', "-Infinity is not JSON"),
    "lone surrogate": (b'{"schema": "\\ud800"}', r"a text has \\ud800, half of a surrogate pair"),
    "a name twice": (b'{"schema": 1, "schema": 2}', "the name 'schema' comes twice"),
}


@settings(max_examples=50)
@given(st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_values_written_by_json_are_read(value: object) -> None:
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("name", DAMAGED)
def test_everything_else_is_one_error_with_its_reason(name: str) -> None:
    content, reason = DAMAGED[name]
    with pytest.raises(JsonError, match=reason) as caught:
        parse(content)
    assert "\n" not in str(caught.value)


@given(st.binary())
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    with contextlib.suppress(JsonError):
        parse(content)


def test_as_deep_as_it_may_be() -> None:
    whole = b"[" * DEEPEST + b"]" * DEEPEST
    assert re.fullmatch(r"\[+\]+", json.dumps(parse(whole)))
    with pytest.raises(JsonError, match="nests more than"):
        parse(b"[" + whole + b"]")
