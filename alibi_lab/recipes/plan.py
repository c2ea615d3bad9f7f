"""What a recipe trains, tests and measures, what of it is recorded, and how long the rest takes here.

`alibi run NAME --dry-run` lists all of it, `--missing` what is not recorded. The time of a training follows from its FLOPs at
the measured rate of one feed-forward layer, the time of its tests from theirs: usually within a factor of 2. No model is made.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch.nn import functional

from alibi_attn.nn.linear.fastest import linear
from alibi_lab.lab.config import DataConfig, RunConfig, Scale, Selection
from alibi_lab.lab.data.corpus import Corpus, load_corpus, random_corpus
from alibi_lab.lab.evaluation.evaluate import stride_at
from alibi_lab.lab.experiment import processes
from alibi_lab.lab.planning import by_training, configs_of
from alibi_lab.lab.run import make_run, run_name, run_title
from alibi_lab.lab.training.flops import DTYPES, attention_flops, linear_flops, multiplying_parameters
from alibi_lab.lab.training.parallel import prepare
from alibi_lab.lab.training.train import steps
from alibi_lab.recipes import index
from alibi_lab.recipes.paper.cells import by_study, select
from alibi_lab.recipes.paper.run_items import recorded_speed

_PARTS = ("training", "evaluation", "speed")
_STEPS = 3  # measured; the first one is slow
_ROWS = 2048  # of the measured products, at most
# A step takes 1.1 to 1.7 times its FLOPs at the rate of a feed-forward layer: attention, the loss, the optimizer.
_BEYOND_PRODUCTS = 1.4
# Tests are in fp32: 1.8 to 2.8 times the training's time per FLOP in records at medium.
_SLOWER_TESTS = {"bf16": 2.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One training with its tests, or one measurement of speed.

    Args:
        study: "speed", or whose training it is.
        tokens: read in training.
        missing: what is not recorded yet: "training" and "evaluation", one of them, "speed", or nothing.
        seconds: the estimated time of what is missing, on this device with this process's threads. Tasks, memories and
            sinks do not count.
    """

    title: str
    study: str
    tokens: int
    missing: tuple[str, ...]
    seconds: float


def plan(name: str, *, out: Path, shard: tuple[int, int] = (0, 1), **selection: Unpack[Selection]) -> list[Planned]:
    """Everything that the recipe `name` runs in the folder `out`, in order. Trains nothing.

    Of a shard (i, n) it is every n-th training, as in `experiment.run`; a shard of the paper measures no speed.

    A new text is tokenized, into `out`/tokens if that folder exists. If `out` has no records, the text is not read.

    Raises:
        ConfigError, CorpusError: as for `index.run`.
    """
    corpora: dict[DataConfig, Corpus] = {}
    rates: dict[object, float] = {}
    planned = []
    for study, runs in _trainings(name, shard, selection):
        config, seconds = runs[0], 0.0
        missing_parts = [_missing(study, run, out, selection.get("scale", "small"), corpora) for run in runs]
        missing = tuple(part for part in _PARTS if any(part in parts for parts in missing_parts))
        if missing:
            shape = (config.model.embed_dim, config.model.ffn_dim, config.train.precision)
            if shape not in rates:
                rates[shape] = flops_per_second(config)
            training = training_flops(config) / rates[shape]
            tested = [run for run, parts in zip(runs, missing_parts, strict=True) if parts not in ((), ("training",))]
            tests = training * sum(map(evaluation_flops, tested)) / training_flops(config)
            seconds = training * (missing != ("evaluation",)) + tests * _SLOWER_TESTS.get(config.train.precision, 1.0)
        tokens = config.train.steps * config.train.batch_tokens
        name = run_name(study, config.model.method, config.train.length, config.train.seed)
        title = run_title(name, config.data.corpus)
        planned.append(Planned(title=title, study=study, tokens=tokens, missing=missing, seconds=seconds))
    return planned


def shortened_to(minutes: float, name: str, **selection: Unpack[Selection]) -> dict[str, str]:
    """Overrides of `train.steps` and `train.warmup_steps` with which each training takes about this long here, without tests.

    All trainings get the same number of steps, that of the slowest, from a few measured steps of each model. The share of the
    warm-up stays that of the first.
    """
    runs = [group[0] for _, group in _trainings(name, (0, 1), selection)]
    seconds = [_seconds_per_step(run) for run in {(run.model, run.train.length): run for run in runs}.values()]
    steps = max(1, int(60 * minutes / max(seconds)))
    warmup = round(steps * runs[0].train.warmup_steps / runs[0].train.steps)
    return {"train.steps": str(steps), "train.warmup_steps": str(warmup)}


def flops_per_second(config: RunConfig) -> float:
    """The rate of a training here: that of a feed-forward layer of its width, forward and backward, on all processes.

    On a CPU it is per second of processor time, divided by the threads, so that other programs hardly change it.
    """
    state, model, settings = processes(), config.model, config.train
    device, rows = state.device, min(_ROWS, settings.batch_tokens)
    shapes = ((rows, model.embed_dim), (model.ffn_dim, model.embed_dim), (model.embed_dim, model.ffn_dim))
    x, up, down = (torch.ones(shape, device=device, requires_grad=True) for shape in shapes)
    seconds = []
    for _ in range(_STEPS):
        began = time.perf_counter(), time.process_time()
        with torch.autocast(device.type, DTYPES[settings.precision], enabled=settings.precision != "no"):
            y = linear(functional.silu(linear(functional.rms_norm(x, x.shape[1:]), up)), down)
        for gradient in torch.autograd.grad((y * y).sum(), (x, up, down)):
            gradient.sum().item()  # waits for the device
        passed, busy = time.perf_counter() - began[0], time.process_time() - began[1]
        seconds.append(busy / torch.get_num_threads() if device.type == "cpu" else passed)
    return state.num_processes * 12 * up.numel() * rows / min(seconds) / _BEYOND_PRODUCTS


def training_flops(config: RunConfig) -> float:
    """The FLOPs of all steps of a training, as in `lab/training/flops.py`."""
    return config.train.steps * float(linear_flops(config) + attention_flops(config))


def evaluation_flops(config: RunConfig) -> float:
    """The FLOPs of forward passes at every length: nonoverlapping windows, and windows that slide by the stride.

    A window of L tokens that slides by S reads every token L / S times.
    """
    total = 0.0
    for length in config.eval.lengths:
        read = config.eval.tokens * (1 + length / stride_at(length, config.eval.stride))
        pairs = read * (length + 1) / 2
        total += 2 * multiplying_parameters(config.model) * read
        total += 4 * config.model.num_layers * config.model.embed_dim * pairs
    return total


def _trainings(name: str, shard: tuple[int, int], selection: Selection) -> Iterator[tuple[str, list[RunConfig]]]:
    """(study, the runs of one training) of everything that a recipe runs. A training that items share comes once."""
    studies: Mapping[str, Sequence[RunConfig]]
    if items := index.items_of(name):
        studies = by_study([select(item, **selection) for item in items], shard)
    else:
        recipe = index.RECIPES[name]
        studies = {recipe.study or name: configs_of(recipe, **selection)}
    for study, runs in studies.items():
        yield from ((study, group) for group in by_training(runs, shard))


def _missing(study: str, run: RunConfig, out: Path, scale: Scale, corpora: dict[DataConfig, Corpus]) -> tuple[str, ...]:
    if study == "speed":
        return () if recorded_speed(run, out / "records", scale=scale) else ("speed",)
    if not (out / "records").is_dir():
        return ("training", "evaluation")
    if run.data not in corpora:
        corpora[run.data] = load_corpus(run.data, out / "tokens" if (out / "tokens").is_dir() else None)
    return make_run(study, run, corpora[run.data], out).missing()


def _seconds_per_step(config: RunConfig) -> float:
    with torch.random.fork_rng():
        corpus = random_corpus(config.model.vocab_size, config.train.batch_tokens + 1)
        taken = steps(prepare(config), corpus)
        seconds = [one.seconds for one in itertools.islice(taken, _STEPS)]
        del taken  # ends it
    return min(seconds[1:])
