"""What an experiment runs: the configs of a recipe with the changes of a command, grouped by training and split into shards.

Next: `experiment.py`, which runs them.
"""

from collections.abc import Sequence
from typing import Unpack

from alibi_lab.lab.config import ConfigError, Recipe, RunConfig, Selection, check_scale
from alibi_lab.lab.config_io import override
from alibi_lab.lab.model.positions import check_segments, check_stretch, stretches_of


def configs_of(recipe: Recipe, **selection: Unpack[Selection]) -> list[RunConfig]:
    """All runs of the recipe, with the changes of a `Selection`. A given method runs those stretches of the recipe that it has.

    Raises:
        ConfigError: an invalid field or value, a scale that the recipe does not have, or a position method that does not
            support the run.
    """
    scale, overrides = selection.get("scale", "small"), selection.get("overrides", {})
    seeds, methods = selection.get("seeds", ()), selection.get("methods", ())
    check_scale(recipe.name, scale, recipe.scales)
    configs = [override(config, overrides) for config in recipe.runs(scale)]
    if methods:
        configs = [override(config, {"model.method": method}) for method in methods for config in configs]
    if methods and "eval.stretch" not in overrides:
        configs = [config for config in configs if config.eval.stretch in stretches_of(config.model.method)]
    if seeds:
        configs = [override(config, {"train.seed": str(seed)}) for seed in seeds for config in configs]
    if len({config.train.precision for config in configs}) > 1:
        raise ConfigError("the runs of one experiment must share train.precision; run them as separate experiments")
    for config in configs:
        check_stretch(config.model.method, config.eval.stretch)
        if config.data.segments:
            check_segments(config.model.method)
    return list(dict.fromkeys(configs))


def by_training(configs: Sequence[RunConfig], shard: tuple[int, int] = (0, 1)) -> list[list[RunConfig]]:
    """The runs grouped by training; runs of one group differ only in their tests.

    Args:
        shard: (i, n): only every n-th training, from training i on.

    Raises:
        ConfigError: the shard does not exist.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"shard is {index}/{count} but must be from 0/{count} to {count - 1}/{count}")
    groups: dict[object, list[RunConfig]] = {}
    for config in configs:
        groups.setdefault((config.model, config.data, config.train), []).append(config)
    return list(groups.values())[index::count]
