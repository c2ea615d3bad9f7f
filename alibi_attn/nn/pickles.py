"""The number of the format that a pickled cache is in: another one is refused, and never read as if it were ours."""

from collections.abc import Mapping


def check_format(kind: str, state: Mapping[str, object], *, reads: int) -> None:
    """Refuse what another version has pickled.

    Args:
        kind: the class, as its user calls it.
        state: what came out of the pickle; its "format" is an int.
        reads: the format that this version writes and reads.

    Raises:
        ValueError: another format, or none.
    """
    came = state.get("format")
    if type(came) is not int or came != reads:
        found = "no format" if came is None else f"format {came!r}"
        raise ValueError(
            f"the pickled {kind} has {found} but this version of alibi-attn reads format {reads}; unpickle it with the version "
            f"that wrote it, or make a new {kind} and pass the text through the model again"
        )
