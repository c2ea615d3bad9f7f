"""Invalid JSON files, or files with Python's extensions of JSON, with a pattern of every reader's error message."""

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
