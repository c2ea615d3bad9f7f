"""The configs of the lab: every choice is a field of a frozen dataclass, changed by name ("train.steps=50").

A `RunConfig` is one training and its evaluation; a `Recipe` is a question and the runs that answer it. A config is checked when
it is made. `alibi config` prints the comments of the fields. Next: `model/positions.py`.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from alibi_lab.position_methods import LOOKS, Look

Method: TypeAlias = str  # a name in `alibi_lab/position_methods.py`, or an import path
Architecture: TypeAlias = Literal["modern", "mpt", "baevski-auli"]
Optimizer: TypeAlias = Literal["adamw", "nag"]
Precision: TypeAlias = Literal["no", "bf16", "fp16"]
Scale: TypeAlias = Literal["smoke", "small", "medium", "gpu", "paper"]
Split: TypeAlias = Literal["valid", "test"]
Stretch: TypeAlias = Literal["none", "linear", "ntk", "yarn"]
SymbolTask: TypeAlias = Literal["mqar", "needles", "copy", "flip-flop"]
Task: TypeAlias = Literal["passkey", "recall", SymbolTask]
IMPORT_PATH = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")  # FILE.py:Class or package.module:Class
METHOD_MODULE = "alibi_method_"  # how the names of modules imported from FILE.py begin
TOKENIZER_NAME = r"bytes|words|bpe:[1-9]\d*|.+\.json|.*/.*"
MAX_INTEGER = 10**12  # of integers: seeds times a million fit into the 64 bits of torch's generators
_KINDS: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_KINDS |= {types.NoneType: "none", Look: "a Look"}
TASK_CORPUS = re.compile(rf"task:({'|'.join(typing.get_args(Task))})(?::([1-9]\d*))?")


class ConfigError(ValueError):
    """A field that does not exist, or an invalid value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder; input and output embeddings are shared.

    "modern": RMS norm before each part, SwiGLU, no biases. "mpt": layer norm, GELU, no biases, as MPT has them, so that a
    checkpoint can be exported. "baevski-auli": the paper's, layer norm, ReLU, biases, adaptive inputs and softmax.
    """

    method: Method = "alibi"
    architecture: Architecture = "modern"
    vocab_size: int = 256  # at least the number of the tokenizer's tokens
    num_layers: int = 4
    num_heads: int = 4
    embed_dim: int = 128
    ffn_dim: int = 344  # 8/3 of the width for SwiGLU, which has three matrices, costs as much as 4 times with two
    cutoffs: tuple[int, ...] = ()  # of adaptive inputs and softmax, in tokens by frequency; empty = one plain embedding
    dropout: float = 0.0  # of the output of each attention and feed-forward part, and of the embeddings
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0  # inside the feed-forward part
    softmax_dropout: float = 0.0  # of the inputs of an adaptive softmax and of its further bands

    def __post_init__(self) -> None:
        check_fields("model", self)
        if not IMPORT_PATH.fullmatch(self.method) and self.method not in LOOKS:
            found = f"model.method is {self.method!r}{nearest(self.method, tuple(LOOKS))}"
            advice = f"pass one of {', '.join(LOOKS)}, or your own as FILE.py:Class or package.module:Class"
            raise ConfigError(f"{found}; {advice}")
        for name in ("dropout", "attention_dropout", "activation_dropout", "softmax_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it is a probability, 0 or more and below 1")
        if self.cutoffs and (self.architecture != "baevski-auli" or list(self.cutoffs) != sorted(set(self.cutoffs))):
            found = f"model.cutoffs is {self.cutoffs} and model.architecture {self.architecture!r}"
            raise ConfigError(f'{found}; cutoffs rise, and only "baevski-auli" has them')
        if self.embed_dim % (2 * self.num_heads):
            found = f"model.embed_dim is {self.embed_dim} and model.num_heads is {self.num_heads}"
            advice = f"pass an embed_dim that {2 * self.num_heads} divides"
            raise ConfigError(f"{found}, but each head needs an even number of channels; {advice}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text: a corpus, or local files and folders in `text`.

    A corpus is "python-source" (the source files that Python ships with), "hub:NAME[:CONFIG]", or "task:NAME[:LENGTH]":
    generated documents of LENGTH tokens, where NAME is a `Task` (see `data/tasks.py`). Files named *train*, *valid* and
    *test* define their own split.
    """

    corpus: str = "python-source"  # "python-source", "hub:NAME[:CONFIG]" or "task:NAME[:LENGTH]"
    text: tuple[str, ...] = ()  # files and folders, instead of a corpus
    tokenizer: str = "bytes"  # "bytes", "words" (as in WikiText), "bpe:SIZE" or path/tokenizer.json
    valid_share: float = 0.05  # of the bytes; ignored if the corpus has its own split
    test_share: float = 0.0  # the same, for a second text that no choice depends on
    text_field: str = ""  # of JSON, JSON Lines, CSV and Parquet files in `text`; by default "text"
    segments: bool = False  # attend within documents only; needs a method that depends on distances only

    def __post_init__(self) -> None:
        check_fields("data", self)
        if self.text and self.corpus == "python-source":
            object.__setattr__(self, "corpus", "text")  # so that no record names a corpus that was not read
        is_task = TASK_CORPUS.fullmatch(self.corpus) is not None
        if self.corpus not in ("python-source", "text") and not self.corpus.startswith("hub:") and not is_task:
            known = ("python-source", "hub:NAME", *(f"task:{task}" for task in typing.get_args(Task)))
            named = ", ".join(f'"{one}"' for one in known)
            advice = f'pass {named} (or "task:recall:LENGTH"), or files in data.text'
            raise ConfigError(f"data.corpus is {self.corpus!r}{nearest(self.corpus, known)}; {advice}")
        if is_task and self.tokenizer != "bytes":
            raise ConfigError(f'data.corpus is {self.corpus!r}, made of bytes; leave data.tokenizer at "bytes"')
        if (self.corpus == "text") != bool(self.text):
            raise ConfigError(f"data.corpus is {self.corpus!r} and data.text is {self.text!r}; pass one or the other")
        if not (self.valid_share > 0 and self.test_share >= 0 and self.valid_share + self.test_share < 1):
            found = f"data.valid_share is {self.valid_share} and data.test_share {self.test_share}"
            rule = "they are shares of the text: valid above 0, test 0 or more, together below 1"
            raise ConfigError(f"{found}; {rule}")
        if not re.fullmatch(TOKENIZER_NAME, self.tokenizer):
            allowed = '"bytes", "words", "bpe:SIZE", as in bpe:4096, or a Hugging Face tokenizer'
            advice = f"pass {allowed}: path/tokenizer.json, or a folder with this file as ./FOLDER"
            raise ConfigError(f"data.tokenizer is {self.tokenizer!r}; {advice}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training: AdamW or Nesterov's momentum ("nag"), a linear warm-up, then a cosine down to a share of the rate.

    `first_steps` steps may be trained at `first_length` before the rest at `length`: staged training, short to long.
    """

    length: int = 128  # tokens per training example, L in the paper
    steps: int = 200  # updates of the weights
    batch_tokens: int = 4096  # over all processes; a multiple of the length
    first_length: int | None = None  # the length of the first steps, in staged training
    first_steps: int = 0  # the number of steps at the first length
    optimizer: Optimizer = "adamw"
    learning_rate: float = 2e-3
    final_share: float = 0.1  # of the learning rate, at the end of the cosine
    warmup_steps: int = 20
    weight_decay: float = 0.1  # matrices only
    clip_norm: float = 1.0
    seed: int = 0  # initial weights and order of the data
    precision: Precision = "no"
    accumulate: int = 1  # the number of parts in which a batch is computed
    parallel: Literal["ddp", "fsdp"] = "ddp"  # how several processes share the weights
    context_parallel: int = 1  # the number of processes that share every sequence, each with consecutive tokens
    exchange_timeout_s: float = 600.0  # of an exchange between these processes
    activation_checkpointing: bool = False
    compile: bool = False  # the layers, with torch.compile
    log_every: int = 10  # steps between points of the training curve
    checkpoint_every: int = 100  # steps; Ctrl-C writes a checkpoint too
    validate_every: int = 0  # steps between validations during the training; 0 = none
    validate_length: int | None = None  # tokens per validation window; None = the trained length
    validate_tokens: int = 8192  # scored in a validation

    def __post_init__(self) -> None:
        check_fields("train", self, may_be_0=("warmup_steps", "weight_decay", "seed", "first_steps", "validate_every"))
        first, steps = self.first_length, self.first_steps
        if (first is None) != (steps == 0) or steps >= self.steps:
            found = f"train.first_length is {first} and train.first_steps {steps} of {self.steps}"
            raise ConfigError(f"{found}; pass both, fewer first steps than steps, or neither")
        timeout, share, rate, norm = self.exchange_timeout_s, self.final_share, self.learning_rate, self.clip_norm
        if not 0 < timeout < 1e9:
            raise ConfigError(f"train.exchange_timeout_s is {timeout}; pass seconds, above 0 and below 10⁹")
        if not 0 <= share <= 1:
            raise ConfigError(f"train.final_share is {share}; it is a share of the learning rate, from 0 to 1")
        if not (rate > 0 and norm > 0):
            raise ConfigError(f"train.learning_rate is {rate} and train.clip_norm is {norm}; both must be above 0")
        step = math.lcm(self.length, first or self.length) * self.accumulate
        if self.batch_tokens % step:
            factors = "train.length" + (" and train.first_length" if first else "")
            factors += " times train.accumulate" if self.accumulate > 1 else ""
            found = f"train.batch_tokens is {self.batch_tokens} but must be a multiple of {factors}, {step}"
            raise ConfigError(f"{found}; the next one is {(self.batch_tokens // step + 1) * step}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The test: the same tokens are scored at every length (see `evaluation/evaluate.py`)."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)  # tested context lengths, in tokens
    tokens: int = 16384  # scored tokens, rounded up to whole stretches of the largest length
    stride: int | None = None  # of the sliding window, in tokens; None = a quarter of each length
    batch_tokens: int = 8192  # tokens per batch; halved if they do not fit in memory
    split: Split = "valid"  # the text to test on
    stretch: Stretch = "none"  # of positions beyond the trained length: rotary (all) or ALiBi (linear, ntk)
    windowed: bool = False  # also test with each token's context cut to the trained length
    tasks: tuple[Task, ...] = ()  # tests that need distant context: see `data/tasks.py`
    trials: int = 16  # documents of a task per length, and per depth or distance if the task has them
    memory: tuple[int, ...] = ()  # also read in segments of each length, with this many cached tokens before each
    sinks: tuple[int, ...] = ()  # also read with this many first tokens and a window, each length in total

    def __post_init__(self) -> None:
        check_fields("eval", self)
        if not self.lengths or min(self.lengths) < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"eval.lengths is {self.lengths}; pass lengths of 1 or more, in rising order, each once")
        for name, most, room in (("memory", self.lengths[-1], "longest"), ("sinks", self.lengths[0], "shortest")):
            kept = getattr(self, name)
            if not all(0 <= one < most for one in kept) or list(kept) != sorted(set(kept)):
                allowed = f"from 0 to {most - 1}, below the {room} of eval.lengths, in rising order"
                raise ConfigError(f"eval.{name} is {kept}; pass numbers of tokens {allowed}")
        if self.stretch != "none" and (self.memory or self.sinks):
            found = f"eval.stretch is {self.stretch!r}, which eval.memory and eval.sinks do not support"
            raise ConfigError(f"{found}; pass eval.stretch=none, or eval.memory= and eval.sinks=")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training and its evaluation."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)


class Selection(TypedDict, total=False):
    """What of a recipe runs; keyword arguments of everything that plans or runs one.

    Args:
        scale: the scale of its runs; "small" by default.
        overrides: fields to change in every run, by name: {"train.steps": "50"}.
        seeds: repeat every run with these seeds instead of the recipe's.
        methods: repeat every run with these position methods instead of the recipe's.
    """

    scale: Scale
    overrides: Mapping[str, str]
    seeds: Sequence[int]
    methods: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One question and the runs that answer it, at several scales with one code path.

    Recipes of one study share their trainings and their folder.

    Args:
        name: the argument of `alibi run`, "quick".
        question: the question that the runs answer.
        paper: the section, figure or table it regenerates.
        cost: the measured time of each scale.
        expected: the expected answer, so that a different result stands out.
        runs: scale -> configs; the experiment repeats them for other seeds.
        scales: the scales that it has.
        study: the prefix of the records' names; by default the recipe's name.
        command: how to run it; by default `alibi run` and the name.
    """

    name: str
    question: str
    paper: str
    cost: str
    expected: str
    runs: Callable[[Scale], tuple[RunConfig, ...]]
    scales: tuple[Scale, ...] = ("smoke", "small", "medium", "paper")
    study: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", self.command or f"alibi run {self.name}")


def check_scale(recipe: str, scale: Scale, scales: Sequence[Scale]) -> None:
    """Checks that a recipe of this name and these scales has this scale.

    Raises:
        ConfigError: it does not; the message lists those that it has.
    """
    if scale not in scales:
        raise ConfigError(f"{recipe} has no scale {scale!r}; pass one of {', '.join(scales)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}{nearest(value, choices)}; pass one of {', '.join(choices)}")


def check_fields(
    section: str, config: object, *, may_be_0: Sequence[str] = (), kinds: Mapping[str, object] | None = None
) -> None:
    """Checks that fields have their types and choices, and that integers are 1 (or 0 for the named ones) to `MAX_INTEGER`.

    Args:
        kinds: the types of the fields; those of a dataclass by default.
    """
    for name, kind in (kinds or typing.get_type_hints(type(config))).items():
        value, several = getattr(config, name), typing.get_origin(kind) is tuple
        item = typing.get_args(kind)[0] if several else kind
        if several and not isinstance(value, tuple | list):
            raise ConfigError(f"{section}.{name} is {value!r} but must be {described(kind)}")
        for one in value if several else (value,):
            if not _fits(one, item):
                raise ConfigError(f"{section}.{name} is {one!r} but must be {described(item)}")
            if typing.get_origin(item) is Literal:
                check_choice(f"{section}.{name}", one, typing.get_args(item))
        least = 0 if name in may_be_0 else 1 if kind in (int, int | None) else None
        if None not in (least, value) and not least <= value <= MAX_INTEGER:
            raise ConfigError(f"{section}.{name} is {value} but must be {least} or more, and at most {MAX_INTEGER}")


def _fits(value: object, kind: object) -> bool:
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return any(_fits(value, one) for one in typing.get_args(kind)) or type(value) is kind


def described(kind: object) -> str:
    """What a field of this type may hold, as errors say it."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of values, each {described(typing.get_args(kind)[0])}"
    if isinstance(kind, types.UnionType):
        return " or ".join(described(option) for option in typing.get_args(kind))
    return _KINDS[kind]


def nearest(name: str, names: tuple[str, ...]) -> str:
    tails = {option.rpartition(".")[2]: option for option in names}  # "step" means "train.steps"
    whole = difflib.get_close_matches(name, names, n=1)
    last = [tails[tail] for tail in difflib.get_close_matches(name.rpartition(".")[2], tails, n=1)]
    return f" (did you mean {(whole or last)[0]!r}?)" if whole or last else ""
