"""The runs that a recipe has not recorded yet, with an estimate of their cost: `alibi run NAME --missing`.

The estimate divides the model's FLOPs by a fixed share of the rate at which one core multiplies matrices in the training's
precision (tests are in fp32). This rate is measured immediately before, so on a busy machine the estimate is too high.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from alibi_attn.lab.config import DataConfig, Precision, RunConfig, Scale
from alibi_attn.lab.data.corpus import Corpus, load_corpus
from alibi_attn.lab.evaluation.evaluate import stride_at
from alibi_attn.lab.experiment import configs_of
from alibi_attn.lab.run import lacks, run_title
from alibi_attn.measure.timing import elapsed_ms, matrix_rate_gflops
from alibi_attn.measure.utilization import attention_flops, linear_flops, multiplying_parameters, product_in
from alibi_attn.recipes import index
from alibi_attn.recipes.paper import measure_speed
from alibi_attn.recipes.paper.cells import ask

UTILIZATION = 0.45  # of the matrix rate; `alibi bench training` measures 0.42 to 0.45 in bf16 and 0.75 to 0.81 in fp32


@dataclasses.dataclass(frozen=True)
class Missing:
    """A run without all its records: which of "training", "evaluation" and "speed" are missing, and their cost."""

    title: str
    parts: tuple[str, ...]
    core_minutes: float


def missing(
    name: str, *, out: Path, scale: Scale = "small", overrides: Mapping[str, str] | None = None, seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
) -> list[Missing]:  # fmt: skip
    """The runs of a recipe that are not recorded in `out`, in the order in which they run. Reads the texts; trains nothing.

    Raises:
        ConfigError, CorpusError: as for `index.run`.
    """
    corpora: dict[DataConfig, Corpus] = {}
    counted: set[object] = set()  # a training that several runs share counts once
    found: list[Missing] = []
    parts: tuple[str, ...]
    for study, config in _runs(name, scale, overrides or {}, seeds, methods):
        if study == "speed":
            parts = () if measure_speed.recorded(config, out / "records", scale=scale) else ("speed",)
        else:
            if config.data not in corpora:
                corpora[config.data] = load_corpus(config.data, out / "tokens")
            parts = lacks(study, config, corpora[config.data], out)
            shared = (config.model, config.data, config.train)
            if "training" in parts:
                parts = tuple(part for part in parts if part != "training" or shared not in counted)
                counted.add(shared)
        if parts:
            minutes = sum(_core_minutes(config, part) for part in parts)
            found.append(Missing(run_title(study, config), parts, minutes))
    return found


def training_flops(config: RunConfig) -> float:
    """The FLOPs of all steps of a training, as in `measure/utilization.py`."""
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


def _runs(
    name: str, scale: Scale, overrides: Mapping[str, str], seeds: Sequence[int], methods: Sequence[str]
) -> list[tuple[str, RunConfig]]:
    """(study, run) of everything that a recipe runs."""
    items = index.items_of(name)
    if items:
        asked = (ask(item, scale, overrides, seeds, methods) for item in items)
        return list(dict.fromkeys((one.item.recipe.study, run) for one in asked for run in one.runs))
    recipe = index.RECIPES[name]
    return [(recipe.study or recipe.name, run) for run in configs_of(recipe, scale, overrides, seeds, methods)]


def _core_minutes(config: RunConfig, part: str) -> float:
    if part == "evaluation":
        flops, gflops = evaluation_flops(config), _core_gflops("no")
    else:
        flops, gflops = training_flops(config), _core_gflops(config.train.precision)
    return flops / (1e9 * UTILIZATION * gflops) / 60


@functools.cache
def _core_gflops(precision: Precision) -> float:
    """The rate of a matrix product on one core, in the dtype that a training in this precision multiplies in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = product_in(precision)
        product()
        return matrix_rate_gflops(elapsed_ms(product))
    finally:
        torch.set_num_threads(threads)
