"""What a family of checkpoints is: how its weights are called, and what its config says. Read next: `baichuan.py`."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from alibi_attn.hf.causal_lm.config import ALiBiCausalLMConfig

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one linear map or norm of ours comes from.

    Args:
        names: theirs, without ".weight"; several are put below one another.
        transposed: the weight is stored [in, out], as GPT-2's Conv1D has it.
        half: 0 or 1 where ours is the upper or the lower half of the rows.
    """

    names: tuple[str, ...]
    transposed: bool = False
    half: int | None = None


Parts: TypeAlias = Mapping[str, Source]


class Options:
    """A config.json of other people, or a section of it, whose values are read with their types or refused by name."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, name: str, default: object = _MISSING) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: object = _MISSING) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: object = _MISSING) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: object = _MISSING) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def section(self, name: str) -> "Options":
        """An object inside, or an empty one where there is none."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self._wrong(name, value, "an object")
        return Options(value or {}, f"{self.where}, {name}")

    def has(self, name: str) -> bool:
        """Whether it is there, and not null."""
        return self.values.get(name) is not None

    def must_be(self, name: str, *allowed: object) -> None:
        """Refuse what is not computed here; null and nothing are the first of those that are allowed."""
        value = self.values.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            raise self._wrong(name, value, " or ".join(repr(one) for one in allowed))

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None and default is _MISSING:
            raise ValueError(f"{self.where} lacks {name}; download the checkpoint again")
        return default if value is None else value

    def _wrong(self, name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{self.where} has {name} = {value!r} but only {wanted} can be read here")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a family reads: the config, and the weights by their names without a prefix; what it takes of them it pops."""

    folder: Path
    about: Options
    state: dict[str, Tensor]
    normalized_head: bool | None


@dataclasses.dataclass(frozen=True)
class Family:
    """One layout of weights.

    Args:
        name: for people.
        model_types: that its configs may say.
        body: what the names of everything but the head begin with.
        layers: what comes before the number of a layer.
        marks: of these one stands in every layer; no other family has it.
        outside: ours -> theirs, of what is in no layer; the head is left out where it is the embeddings.
        parts: of a layer, ours -> theirs; told what names there are.
        ignored: endings of names that hold nothing learned.
        config: of a checkpoint.
    """

    name: str
    model_types: tuple[str, ...]
    body: str
    layers: str
    marks: tuple[str, ...]
    outside: Parts
    parts: Callable[[Collection[str]], Parts]
    ignored: tuple[str, ...]
    config: Callable[[Checkpoint], ALiBiCausalLMConfig]
