"""Lists the trainings of an experiment before they run: their tokens, their estimated time, and which are recorded."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from alibi_attn.lab import experiment
from alibi_attn.lab.config import Recipe, RunConfig, Scale
from alibi_attn.lab.data.corpus import Corpus, load_corpus
from alibi_attn.lab.run import recorded, run_title
from alibi_attn.lab.training.parallel import prepare
from alibi_attn.lab.training.train import steps

_STEPS = 3  # measured; the first one is slow


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """One training and its tests.

    Args:
        seconds: the estimated time of the training, without its tests.
        recorded: whether the training and all its tests have records.
    """

    title: str
    tokens: int
    seconds: float
    recorded: bool


def plan(
    recipe: Recipe,
    *,
    out: Path,
    scale: Scale = "small",
    overrides: Mapping[str, str] | None = None,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
) -> list[PlannedTraining]:
    """The trainings that `experiment.run` would run, without writing anything. Measures a few steps of each on random tokens.

    Raises:
        ConfigError, CorpusError: as for `experiment.run`.
    """
    study, planned = recipe.study or recipe.name, []
    for runs in experiment.by_training(experiment.configs_of(recipe, scale, overrides or {}, seeds, methods)):
        config = runs[0]
        done = False
        if (out / "records").is_dir():
            corpus = load_corpus(config.data, out / "tokens" if (out / "tokens").is_dir() else None)
            done = all(all(recorded(study, run, corpus, out)) for run in runs)
        tokens = config.train.steps * config.train.batch_tokens
        seconds = 0.0 if done else config.train.steps * _seconds_per_step(config)
        planned.append(PlannedTraining(run_title(study, config), tokens, seconds, done))
    return planned


def _seconds_per_step(config: RunConfig) -> float:
    with torch.random.fork_rng():
        length = config.train.batch_tokens + 1
        tokens = torch.randint(config.model.vocab_size, (length,), dtype=torch.int32)
        corpus = Corpus(tokens, tokens, {}, starts={"train": torch.tensor([0])})
        taken = steps(prepare(config), config, corpus)
        seconds = [next(taken).seconds for _ in range(_STEPS)]
        del taken  # ends it
    return min(seconds[1:])
