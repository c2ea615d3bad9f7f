"""The definition of a family of checkpoints: the names of its weights, and the translation of its config.

Read next: `baichuan.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint stores one of our linear layers or norms.

    Args:
        names: of its modules; the rows of several are concatenated.
        transposed: weights with two axes are stored [in, out], as in GPT-2's Conv1D.
        half: 0 or 1 if our weight is the first or second half of the rows.
    """

    names: tuple[str, ...]
    transposed: bool = False
    half: int | None = None


Parts: TypeAlias = Mapping[str, Source]

# The sizes that every config has, in our names.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
DECODER_PARTS = (
    "attention_norm",
    "attention.qkv_proj",
    "attention.out_proj",
    "ffn_norm",
    "ffn.gate_proj",
    "ffn.up_proj",
    "ffn.down_proj",
)


def decoder_parts(*sources: str | tuple[str, ...] | Source, transposed: bool = False) -> dict[str, Source]:
    """Where the modules of a decoder layer are stored, in the order of `DECODER_PARTS`."""
    named = ((source,) if isinstance(source, str) else source for source in sources)
    stored = (source if isinstance(source, Source) else Source(source, transposed) for source in named)
    return dict(zip(DECODER_PARTS, stored, strict=True))


class Options:
    """A third-party config.json, or a section of it. Values are type-checked; errors name the field."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, name: str, default: object = _MISSING) -> int:
        return cast("int", self._value(name, default, "an integer", int))

    def shared(self, *names: str) -> dict[str, Any]:
        """The four `SIZES`, from the fields of these names, and the ids of special tokens."""
        ids = {f"{name}_token_id": self.values.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
        return {**ids, **dict(zip(SIZES, map(self.integer, names), strict=True))}

    def number(self, name: str, default: object = _MISSING) -> float:
        return float(cast("float", self._value(name, default, "a number", int, float)))

    def flag(self, name: str, default: object = _MISSING) -> bool:
        return cast("bool", self._value(name, default, "true or false", bool))

    def text(self, name: str, default: object = _MISSING) -> str:
        return cast("str", self._value(name, default, "a text", str))

    def section(self, name: str) -> "Options":
        """A nested object, empty if it is absent."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self._wrong(name, value, "an object")
        return Options(value or {}, f"{self.where}, {name}")

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.values.get(name) is not None

    def must_be(self, **allowed: object) -> None:
        """Raises ValueError unless each field has its allowed value, or one of a tuple; an absent or null field does."""
        for name, values in allowed.items():
            value, choices = self.values.get(name), values if isinstance(values, tuple) else (values,)
            if value is not None and not any(value == one and type(value) is type(one) for one in choices):
                raise self._wrong(name, value, " or ".join(map(repr, choices)))

    def _value(self, name: str, default: object, wanted: str, *types: type) -> object:
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where} has no {name}; download the checkpoint again")
            return default
        if type(value) not in types:
            raise self._wrong(name, value, wanted)
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{self.where} has {name} = {value!r} but only {wanted} is supported")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, as a family's `config` function reads it.

    Args:
        folder: the folder of the checkpoint, for errors.
        about: its config.json.
        tensors: the weights by the family's names, without wrapper prefixes; `config` and `checkpoint.converted` remove those
            that they consume.
        family, parts: the family, and how the modules of a layer are stored.
        changes: fields of the config that the caller passed to `from_pretrained`.
        heads: the family's names of weights outside the prefix that all stored names of the body have; None without a prefix.
    """

    folder: Path
    about: Options
    tensors: dict[str, Tensor]
    family: "Family"
    parts: Parts
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heads: frozenset[str] | None = None

    def stored(self, name: str) -> str:
        """The name of one of our weights in the checkpoint; of several, the first."""
        return self.family.places(name, self.parts)[1][0]

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype of one of our weights in the checkpoint; None if it is missing."""
        tensor = self.tensors.get(self.stored(name))
        return None if tensor is None else tensor.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint layout: the names of its weights, and how its config translates to ours.

    Args:
        name: for error messages.
        model_types: the model_type values that its config.json may have; empty to accept any.
        is_typed: its weights have the names of another architecture, so only these model_type values identify it.
        marks: names of weights of layer 0. Every checkpoint of the family has one of them; families earlier in the table do not.
        layers, own_layers: the prefix before a layer's number, in its names and in ours.
        wrappers: prefixes that a wrapper may have added to all names except the head's.
        body: the prefix of all names except the head's; absent if a model was saved without its head.
        outside: our module -> theirs, for modules outside the layers. Modules that are not listed have the same name.
        parts: the same for the modules of a layer, from all names of the checkpoint.
        aliases: other names of a weight, used if the weight is missing under its own name.
        heads: a regular expression of names that are heads, or a part of them, also inside the body.
        ignored: one of names that no model needs, such as buffers.
        repositories: parts of the names of its repositories and files, in lower case.
        classes: how the names of its remote classes begin, in lower case.
        signs: fields of its config, with the values that indicate ALiBi; () for any value.
        config: builds our config for a checkpoint.
        written: builds config.json for one of our models. None: this layout cannot be written.
    """

    name: str
    model_types: tuple[str, ...]
    is_typed: bool = False
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
    repositories: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    signs: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    config: Callable[[Checkpoint], PreTrainedConfig]
    written: Callable[[PreTrainedModel], Mapping[str, object]] | None = None

    def places(self, name: str, parts: Parts) -> tuple[Source, tuple[str, ...]]:
        """How one of our weights is stored, and under which names.

        Args:
            name: ours.
            parts: the result of `parts` for the checkpoint.
        """
        module, kind = name.rsplit(".", 1)
        table, prefix = self.outside, ""
        if match := re.match(re.escape(self.own_layers) + r"(\d+)\.", name):
            table, prefix, module = parts, f"{self.layers}{match[1]}.", module[match.end() :]
        source = table.get(module, Source((module,)))
        return source, tuple(f"{prefix}{their}.{kind}" for their in source.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepModules:
    """Where `decoding_step.py` finds the modules of a pre-norm decoder with one key head per query head: names of attributes.

    Args:
        embedding, first_norm, blocks, last_norm: of the model without a head; "" = no norm after the embedding.
        block, ffn_kind: the classes of a block and of its feed-forward part.
        attention, ffn, norms: of a block; the norms before attention and before the feed-forward part.
        qkv, out: of the attention layer.
        up, activation, down: of the feed-forward part.
        activation_kind: the class of the activation: GELU by erf, or if the family replaces it, in its tanh form.
        by_head: whether the outputs of qkv are [H, 3, D]; else [3, H, D].
        unsupported: ("attention" or "ffn", an attribute of that part): if it is true, modules run.
        residual_after_norm: an attribute of a block: whether its residual is its normalized input; "" = never.
    """

    embedding: str
    first_norm: str = ""
    blocks: str
    last_norm: str
    block: type[nn.Module]
    attention: str
    ffn: str
    ffn_kind: type[nn.Module]
    norms: tuple[str, str]
    qkv: str
    out: str
    up: str
    activation: str
    down: str
    activation_kind: type[nn.Module]
    by_head: bool
    unsupported: tuple[str, str]
    residual_after_norm: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedFamily:
    """A model of transformers whose attention layers `patch` changes.

    Args:
        name: for error messages.
        model: the class without a head.
        layer: the class of its attention layers.
        settings: returns slopes, scale and options of a layer, from (config, backend=, numerics=).
        forward: replaces the forward of each layer.
        mark: the attribute of a patched layer that holds its settings.
        around: replaces the model's forward, after (model, the forward that it had or None, names of its arguments), for biases
            that are not ALiBi's.
        counts_positions: positions are counted over the visible tokens; else they are indices.
        why_not: returns why a config cannot be patched, or None; None = all can.
        unused: attributes of the model that patched layers do not need, and their replacements.
        linears: classes of linear layers that `nn/linear/fastest.py` computes.
        activations: classes of activations, and their faster forward functions, which round differently.
        step: for `decoding_step.py`; None = a decoding step runs module by module.
        classes: how the names of remote classes begin, in lower case, that `instead`, a class of transformers, replaces.
    """

    name: str
    model: type[PreTrainedModel]
    layer: type[nn.Module]
    settings: Callable[..., object]
    forward: Callable[..., tuple[Tensor | None, ...]]
    mark: str = "alibi_settings"
    around: Callable[..., object] | None = None
    counts_positions: bool = True
    why_not: Callable[[Any], str | None] | None = None
    unused: Mapping[str, object] = dataclasses.field(default_factory=dict)
    linears: tuple[type[nn.Linear], ...] = (nn.Linear,)
    activations: Mapping[type[nn.Module], Callable[..., Tensor]] = dataclasses.field(default_factory=dict)
    step: StepModules | None = None
    classes: tuple[str, ...] = ()
    instead: str = ""
