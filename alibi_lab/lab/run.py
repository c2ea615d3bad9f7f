"""One run of an experiment: its names, the configs that identify its records, and which of these exist.

Next: `run_once.py`, which trains and tests it.
"""

import dataclasses
import functools
from pathlib import Path

from rich.markup import escape

from alibi_lab import records
from alibi_lab.lab.config import TASK_CORPUS, RunConfig
from alibi_lab.lab.config_io import to_json
from alibi_lab.lab.data.corpus import Corpus
from alibi_lab.lab.model.imported_method import source_facts
from alibi_lab.records import Json


def run_name(study: str, config: RunConfig) -> str:
    """The name of a run's records; `study` is the recipe's study, or the recipe's name if it belongs to none.

    >>> run_name("quick", RunConfig())
    'quick/alibi-128/seed-0'
    """
    method = config.model.method.rpartition(":")[2]  # an imported method's class
    return f"{study}/{method}-{config.train.length}/seed-{config.train.seed}"


def run_title(study: str, config: RunConfig) -> str:
    """The run's title for display: the name of its records, and its task if it trains on one."""
    name = escape(run_name(study, config))
    return f"{name} on {config.data.corpus}" if TASK_CORPUS.fullmatch(config.data.corpus) else name


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One training and its test, in an output folder.

    Args:
        study: the recipe's study, or the recipe's name if it belongs to none.
    """

    study: str
    config: RunConfig
    corpus: Corpus
    out: Path

    @property
    def name(self) -> str:
        """The name of its records."""
        return run_name(self.study, self.config)

    @property
    def title(self) -> str:
        """Its title for display."""
        return run_title(self.study, self.config)

    @property
    def tokens(self) -> int:
        """The number of tokens of its training."""
        return self.config.train.steps * self.config.train.batch_tokens

    @functools.cached_property
    def evaluation(self) -> dict[str, Json]:
        """The config that identifies its evaluation's record."""
        facts = source_facts(self.config.model.method)
        method: dict[str, Json] = {"method": facts} if facts else {}
        return {**to_json(self.config), "corpus": self.corpus.facts, **method}

    @functools.cached_property
    def training(self) -> dict[str, Json]:
        """The config that identifies its training's record: without the test."""
        return {key: value for key, value in self.evaluation.items() if key != "eval"}

    @functools.cached_property
    def checkpoints(self) -> Path:
        """The folder of its training's checkpoints, named after the run and a hash of its config without the test."""
        return self.out / "checkpoints" / f"{self.name}-{records.identity('training', self.name, self.training)}"

    def recorded(self) -> tuple[Path | None, Path | None]:
        """The paths of its training's and its evaluation's record; None for one that does not exist."""
        folder = self.out / "records"
        training = records.recorded(folder, "training", self.name, self.training)
        return training, records.recorded(folder, "evaluation", self.name, self.evaluation)

    def missing(self) -> tuple[str, ...]:
        """Its missing records: "training", "evaluation", both or none.

        A recorded training is missing too if the evaluation is missing and the trained model was deleted: it would run again.
        """
        training, evaluation = self.recorded()
        trains = training is None or not (evaluation or self.checkpoints.is_dir())
        return (*(["training"] if trains else []), *([] if evaluation else ["evaluation"]))
