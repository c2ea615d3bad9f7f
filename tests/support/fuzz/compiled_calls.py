"""The calls that JAX's backends are compiled for in `keys_attack.py`: few, because a compilation takes seconds."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The static part of a draw, which takes everything else from its seed; `few` is how many "few queries" are."""

    dtype: str
    length: int
    causal: bool
    biased: bool
    masks: tuple[str, ...]
    few: int | None = None


def compiled(dtypes: tuple[str, ...], masks: tuple[str, ...], lengths: tuple[int, ...]) -> tuple[Compiled, ...]:
    """Every dtype with and without a bias, causal and on both sides, with as many queries as keys, half as many, and few."""
    whole = tuple(mask for mask in masks if mask not in ("few queries", "offset after"))
    rows = [(causal, biased, whole, None) for biased in (False, True) for causal in (True, False)]
    rows += [(False, False, ("few queries",), 65), (True, False, ("few queries",), 16)]
    rows += [(True, True, ("offset after",), None)]
    each = enumerate((dtype, row) for row in rows for dtype in dtypes)
    return tuple(Compiled(dtype, lengths[n % len(lengths)], *row) for n, (dtype, row) in each)
