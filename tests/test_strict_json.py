"""Strict JSON: valid JSON is read, and everything else raises one error with a reason."""

import contextlib
import json
import re

import pytest
from damaged_json import DAMAGED
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_attn.strict_json import DEEPEST, JsonError, parse

PLAIN = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.text()
VALUES = PLAIN | st.floats(allow_nan=False, allow_infinity=False)


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
