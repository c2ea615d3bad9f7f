"""Lists the trainings of an experiment before they run: their tokens, their estimated time, and which are recorded."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from alibi_attn.lab import experiment
from alibi_attn.lab.config import Recipe, RunConfig, Scale
from alibi_attn.lab.data.corpus import Corpus, load_corpus
from alibi_attn.lab.run import lacks, run_title
from alibi_attn.lab.training.parallel import prepare
from alibi_attn.lab.training.train import steps

_STEPS = 3  # measured; the first one is slow


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """One training and its tests.

    Args:
        seconds: the estimated time of the training, without its tests; 0 if the trained model is there.
        missing: what has no record yet: ("training", "tests"), ("tests",) or nothing.
    """

    title: str
    tokens: int
    seconds: float
    missing: tuple[str, ...]


def plan(
    recipe: Recipe,
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
) -> list[PlannedTraining]:
    """The trainings that `experiment.run` would run. Trains nothing, but measures a few steps of each on random tokens.

    A new text is tokenized into `out`/tokens if that folder exists.

    Raises:
        ConfigError, CorpusError: as for `experiment.run`.
    """
    study, planned = recipe.study or recipe.name, []
    for runs in experiment.by_training(experiment.configs_of(recipe, scale, overrides or {}, seeds, methods)):
        config = runs[0]
        missing = _missing(study, runs, out) if (out / "records").is_dir() else ("training", "tests")
        tokens = config.train.steps * config.train.batch_tokens
        seconds = config.train.steps * _seconds_per_step(config) if "training" in missing else 0.0
        planned.append(PlannedTraining(run_title(study, config), tokens, seconds, missing))
    return planned


def _missing(study: str, runs: Sequence[RunConfig], out: Path) -> tuple[str, ...]:
    """What the runs of one training lack."""
    corpus = load_corpus(runs[0].data, out / "tokens" if (out / "tokens").is_dir() else None)
    lacking = {part for run in runs for part in lacks(study, run, corpus, out)}
    return ("training", "tests") if "training" in lacking else ("tests",) if lacking else ()


def _seconds_per_step(config: RunConfig) -> float:
    with torch.random.fork_rng():
        length = config.train.batch_tokens + 1
        tokens = torch.randint(config.model.vocab_size, (length,), dtype=torch.int32)
        corpus = Corpus(tokens, tokens, {}, starts={"train": torch.tensor([0])})
        taken = steps(prepare(config), config, corpus)
        seconds = [next(taken).seconds for _ in range(_STEPS)]
        del taken  # ends it
    return min(seconds[1:])
