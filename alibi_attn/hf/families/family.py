"""What defines a family of checkpoints: the names of its weights, and the translation of its config. Read next: `baichuan.py`."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from alibi_attn.hf.patched_attention import AttentionSettings

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint stores one of our linear layers or norms.

    Args:
        names: of its modules; the rows of several are concatenated.
        transposed: the weight is stored [in, out], as GPT-2's Conv1D has it.
        half: 0 or 1 if ours is the first or second half of the rows.
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
    """What a family's `config` function reads.

    Args:
        folder: where the checkpoint is.
        about: its config.json.
        state: the weights by the family's names, without wrapper prefixes; the function pops what it uses up.
        changes: what the caller passed to `from_pretrained` to change the config.
    """

    folder: Path
    about: Options
    state: dict[str, Tensor]
    changes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint layout: the names of its weights, and how its config translates to ours.

    Args:
        name: for people.
        model_types: the model_type values that its config.json may have; empty if the family is not recognized by it.
        marks: weights of layer 0, one of which every checkpoint has, and no family before this one in the table.
        layers, own_layers: what precedes the number of a layer, in its names and in ours.
        wrappers: prefixes that a wrapper may have put before all names but the head's.
        body: what all names but the head's begin with; a model that was saved without its head lacks it.
        outside: our module -> theirs, for what is in no layer. Modules that are not listed have the same name.
        parts: the same for the modules of a layer; gets all names of the checkpoint.
        aliases: other names of a weight, used if the checkpoint lacks that weight.
        heads, ignored: regular expressions of names that a model may do without: those of heads, and buffers.
        config: our config for a checkpoint.
        written: config.json for one of our models in this layout. None: the layout cannot be written.
    """

    name: str
    model_types: tuple[str, ...]
    marks: tuple[str, ...]
    layers: str
    own_layers: str = "layers."
    wrappers: tuple[str, ...] = ("", "module.", "model.", "module.model.")
    body: str = ""
    outside: Parts
    parts: Callable[[Collection[str]], Parts]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    heads: str = "(?!)"
    ignored: str = "(?!)"
    config: Callable[[Checkpoint], PreTrainedConfig]
    written: Callable[[PreTrainedModel], Mapping[str, object]] | None = None

    def places(self, name: str, parts: Parts) -> tuple[Source, tuple[str, ...]]:
        """How one of our weights is stored, and under which names.

        Args:
            name: ours.
            parts: what `parts` returned for the checkpoint.
        """
        module, kind = name.rsplit(".", 1)
        table, prefix = self.outside, ""
        if match := re.match(re.escape(self.own_layers) + r"(\d+)\.", name):
            table, prefix, module = parts, f"{self.layers}{match[1]}.", module[match.end() :]
        source = table.get(module, Source((module,)))
        return source, tuple(f"{prefix}{their}.{kind}" for their in source.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedFamily:
    """A model of transformers whose attention layers `patch` changes.

    Args:
        name: for people.
        model: the class without a head.
        layer: the class of its attention layers.
        settings: the slopes, scale and options of a layer, from (config, backend=, numerics=).
        forward: replaces that of a layer.
        counts_positions: exact distances are counted over the tokens that the mask shows, so masks with holes are refused.
        why_not: why a config cannot be patched, or None.
        unused: attributes of the model that its patched layers make superfluous, and what replaces them.
        linears: classes of linear layers that `nn/linear.py` computes.
        activations: classes of activations, and their faster forward functions, which round differently.
    """

    name: str
    model: type[PreTrainedModel]
    layer: type[nn.Module]
    settings: Callable[..., AttentionSettings]
    forward: Callable[..., tuple[Tensor, None]]
    counts_positions: bool = True
    why_not: Callable[[Any], str | None] = lambda _: None
    unused: Mapping[str, object] = dataclasses.field(default_factory=dict)
    linears: tuple[type[nn.Linear], ...] = (nn.Linear,)
    activations: Mapping[type[nn.Module], Callable[..., Tensor]] = dataclasses.field(default_factory=dict)
