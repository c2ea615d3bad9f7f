"""What can be asked of the lab: every choice is a field of a frozen dataclass, changed by name ("train.steps=50").

A `RunConfig` is one training and its evaluation; a `Recipe` is a question and the runs that answer it. A config is
checked when it is made, so that everything behind this door may trust it. Read next: `positions.py`.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, TypeVar

from alibi_attn.records import Json

Method: TypeAlias = Literal["none", "sinusoidal", "learned", "rotary", "t5", "alibi"]
Scale: TypeAlias = Literal["smoke", "small", "paper"]
Precision: TypeAlias = Literal["no", "bf16", "fp16"]

_Config = TypeVar("_Config")


class ConfigError(ValueError):
    """A field that does not exist, or a value that it does not take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: RMS norm before each part, SwiGLU, no biases, input and output embeddings shared."""

    method: Method = "alibi"
    vocab_size: int = 256  # bytes
    num_layers: int = 4
    num_heads: int = 4
    embed_dim: int = 128
    ffn_dim: int = 344  # SwiGLU has three matrices: 8/3 of the width costs what 4 times cost with two

    def __post_init__(self) -> None:
        _check_choice("model.method", self.method, typing.get_args(Method))
        _check_at_least("model", self, 1, "vocab_size", "num_layers", "num_heads", "embed_dim", "ffn_dim")
        if self.embed_dim % (2 * self.num_heads):
            raise ConfigError(
                f"model.embed_dim is {self.embed_dim} and model.num_heads is {self.num_heads}, but each head needs an even "
                f"number of channels; pass an embed_dim that {2 * self.num_heads} divides"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text: "python-source" (what Python ships with), "hub:NAME[:CONFIG]", or local files and folders in `text`."""

    corpus: str = "python-source"
    text: tuple[str, ...] = ()
    valid_share: float = 0.05  # of the bytes; the corpora that bring their own split ignore it

    def __post_init__(self) -> None:
        if self.text and self.corpus == "python-source":
            object.__setattr__(self, "corpus", "text")  # so that a record never names a corpus that was not read
        if self.corpus not in ("python-source", "text") and not self.corpus.startswith("hub:"):
            nearest = _nearest(self.corpus, ("python-source", "hub:NAME"))
            raise ConfigError(
                f'data.corpus is {self.corpus!r}{nearest}; pass "python-source", "hub:NAME", or files in data.text'
            )
        if (self.corpus == "text") != bool(self.text):
            raise ConfigError(f"data.corpus is {self.corpus!r} and data.text is {self.text!r}; pass one or the other")
        if not 0 < self.valid_share < 1:
            raise ConfigError(f"data.valid_share is {self.valid_share}; it is a share of the text, between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training: AdamW, a linear warm-up, then a cosine down to a tenth of the learning rate."""

    length: int = 128  # L of the paper: tokens a training example has
    steps: int = 200
    batch_tokens: int = 4096  # over all processes; a multiple of the length
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1  # matrices only
    clip_norm: float = 1.0
    seed: int = 0  # initial weights and order of the data
    precision: Precision = "no"
    log_every: int = 10  # steps between two points of the training curve
    checkpoint_every: int = 100  # steps; Ctrl-C writes one as well

    def __post_init__(self) -> None:
        _check_choice("train.precision", self.precision, typing.get_args(Precision))
        _check_at_least("train", self, 1, "length", "steps", "batch_tokens", "log_every", "checkpoint_every")
        _check_at_least("train", self, 0, "warmup_steps", "weight_decay", "seed")
        if not (self.learning_rate > 0 and self.clip_norm > 0):
            raise ConfigError(
                f"train.learning_rate is {self.learning_rate} and train.clip_norm is {self.clip_norm}; both must be above 0"
            )
        if self.batch_tokens % self.length:
            raise ConfigError(
                f"train.batch_tokens is {self.batch_tokens} but must be a multiple of train.length, {self.length}; "
                f"the next one is {(self.batch_tokens // self.length + 1) * self.length}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The test: the same tokens are scored at every length (see `evaluate.py`)."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    tokens: int = 16384  # to score, rounded up to whole stretches of the largest length
    stride: int | None = None  # of the sliding window, in tokens; None = a quarter of each length
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"eval.lengths is {self.lengths}; pass lengths of 1 or more, in rising order, each once")
        _check_at_least("eval", self, 1, "tokens", "batch_tokens")
        if self.stride is not None:
            _check_at_least("eval", self, 1, "stride")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training and its evaluation."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One question and the runs that answer it, at three scales with one code path.

    Args:
        name: what one types, "quick".
        question: what the runs answer, as a sentence.
        paper: the section, figure or table it regenerates.
        command: how to run it.
        cost: what each scale takes, measured.
        expected: what the answer should look like; a reader who sees something else has found something.
        runs: scale -> configs; seeds are repeated by the experiment.
    """

    name: str
    question: str
    paper: str
    command: str
    cost: str
    expected: str
    runs: Callable[[Scale], tuple[RunConfig, ...]]


def override(config: RunConfig, changes: Mapping[str, str]) -> RunConfig:
    """The config with some fields changed by name; values are given as text and read by the field's type.

    Raises:
        ConfigError: an unknown name (answered with the nearest one) or a value of another type.

    >>> override(RunConfig(), {"train.steps": "50", "eval.lengths": "128,256"}).eval.lengths
    (128, 256)
    """
    names = field_names()
    sections: dict[str, dict[str, object]] = {}
    for name, text in changes.items():
        if name not in names:
            raise ConfigError(f"there is no field {name!r}{_nearest(name, names)}; the fields are: {', '.join(names)}")
        section, field = name.split(".")
        kind = typing.get_type_hints(type(getattr(config, section)))[field]
        sections.setdefault(section, {})[field] = _parse(name, text, kind)
    changed = {section: _replace(getattr(config, section), values) for section, values in sections.items()}
    return _replace(config, changed)


def field_names() -> tuple[str, ...]:
    """Every name that `override` takes: "model.method", "train.steps", ...

    >>> "train.steps" in field_names()
    True
    """
    sections = typing.get_type_hints(RunConfig)
    return tuple(f"{name}.{field.name}" for name, section in sections.items() for field in dataclasses.fields(section))


def to_json(config: RunConfig) -> dict[str, Json]:
    """The config as nested dictionaries of plain values, as records and checkpoints hold it."""
    return {
        section: {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        for section, fields in dataclasses.asdict(config).items()
    }


def from_json(data: object) -> RunConfig:
    """The config that `to_json` wrote.

    Raises:
        ConfigError: other sections or other fields than this version has.
    """
    sections = typing.get_type_hints(RunConfig)
    if not isinstance(data, Mapping) or not data.keys() >= sections.keys():
        raise ConfigError(f"a config has the sections {', '.join(sections)}; this one is not made of them")
    return RunConfig(**{name: _section(name, kind, data[name]) for name, kind in sections.items()})


def _section(name: str, kind: Callable[..., _Config], data: object) -> _Config:
    hints = typing.get_type_hints(kind)
    if not isinstance(data, Mapping) or data.keys() != hints.keys():
        raise ConfigError(f"section {name!r} of a config has the fields {', '.join(hints)}; this one has others")
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in data.items()}
    for field, value in values.items():
        if not _fits(value, hints[field]):
            raise ConfigError(f"{name}.{field} is {value!r} but must be {_describe(hints[field])}")
    return kind(**values)


def _fits(value: object, kind: object) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(kind))
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is kind


def _parse(name: str, text: str, kind: object) -> object:
    if typing.get_origin(kind) is Literal:
        _check_choice(name, text, typing.get_args(kind))
        return text
    if typing.get_origin(kind) is tuple:
        return tuple(_parse(name, item.strip(), typing.get_args(kind)[0]) for item in text.split(",") if item.strip())
    if isinstance(kind, types.UnionType):
        return None if text.lower() == "none" else _parse(name, text, typing.get_args(kind)[0])
    if kind is str:
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r} but must be {_describe(kind)}") from None


def _describe(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of values, each {_describe(typing.get_args(kind)[0])}"
    if isinstance(kind, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(kind))
    names: dict[object, str] = {int: "a whole number", float: "a number", str: "text", types.NoneType: "none"}
    return names[kind]


def _replace(config: _Config, values: Mapping[str, object]) -> _Config:
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}{_nearest(value, choices)}; pass one of {', '.join(choices)}")


def _check_at_least(section: str, config: object, least: int, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ConfigError(f"{section}.{name} is {getattr(config, name)} but must be {least} or more")


def _nearest(name: str, names: tuple[str, ...]) -> str:
    tails = {option.rpartition(".")[2]: option for option in names}  # whoever types "step" means "train.steps"
    whole = difflib.get_close_matches(name, names, n=1)
    last = [tails[tail] for tail in difflib.get_close_matches(name.rpartition(".")[2], tails, n=1)]
    return f" (did you mean {(whole or last)[0]!r}?)" if whole or last else ""
