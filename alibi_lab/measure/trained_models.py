"""Small models that benchmarks train with the lab, and the outputs of their layers on held-out text."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from alibi_lab.lab import experiment
from alibi_lab.lab import run as lab_run
from alibi_lab.lab.config import EvalConfig, Method, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_lab.lab.config_io import override
from alibi_lab.lab.data.corpus import Corpus, load_corpus
from alibi_lab.lab.model.language_model import Block, LanguageModel
from alibi_lab.lab.training import checkpoint
from alibi_lab.measure.harness import Say


def small_recipe(
    name: str, methods: Sequence[Method], *, heads: int, sizes: Mapping[str, tuple[int, int]], smoke_length: int
) -> Recipe:
    """The recipe that a benchmark trains with the lab, once per method. The benchmark's module has its cost and expected result.

    Args:
        sizes: (embed_dim, ffn_dim) at the scales "smoke" (two layers) and "small" (four layers).
        smoke_length: the lab's longest test length at scale "smoke".
    """

    def runs(scale: Scale) -> tuple[RunConfig, ...]:
        if scale == "smoke":
            layers = 2
            train = TrainConfig(length=32, steps=8, batch_tokens=256, warmup_steps=2)
            evaluation = EvalConfig(lengths=(32, smoke_length), tokens=smoke_length, batch_tokens=256)
        else:
            layers = 4
            train = TrainConfig(length=512, steps=300, batch_tokens=4096, learning_rate=2e-3, warmup_steps=32)
            evaluation = EvalConfig(lengths=(512, 4096), tokens=16_384)
        width, ffn = sizes[scale]
        model = ModelConfig(num_layers=layers, num_heads=heads, embed_dim=width, ffn_dim=ffn)
        return tuple(RunConfig(model=replace(model, method=method), train=train, eval=evaluation) for method in methods)

    # Recipes of `alibi run` need these texts; this one is not listed there.
    return Recipe(name=name, question="", paper="", cost="", expected="", runs=runs)


def trained(
    recipe: Recipe, folder: Path, scale: str, *, longest: int, text: Sequence[Path] = (), say: Say
) -> Iterator[tuple[RunConfig, LanguageModel, Corpus]]:
    """Trains the recipe's runs in a folder, or resumes them, and yields each config with its model and corpus.

    Args:
        longest: tokens of held-out text that are needed.
        text: files and folders to train and test on; default Python's own source files.

    Raises:
        ValueError: an unknown scale, or a text that is too short; nothing is trained.
    """
    if scale not in ("smoke", "small"):
        raise ValueError(f"scale is {scale!r} but must be 'smoke' or 'small'")
    changes = {"data.corpus": "text", "data.text": ",".join(map(str, text))} if text else {}
    configs = [override(config, changes) for config in recipe.runs(cast(Scale, scale))]
    corpus = load_corpus(configs[0].data, folder / "tokens")
    if len(corpus.valid) < longest:
        raise ValueError(
            f"the text has {len(corpus.valid)} held-out tokens but {longest} are needed; pass a longer text"
        )
    say("training")
    experiment.run(recipe, out=folder, scale=cast(Scale, scale), overrides=changes)
    for config in configs:
        checkpoints = lab_run.make_run(recipe.study or recipe.name, config, corpus, folder).checkpoints
        yield config, checkpoint.load_checkpoint(checkpoints)[0], corpus


def outputs_of(model: LanguageModel, tokens: Tensor, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The outputs [1, n, E] of the named parts of every block on one text [1, n]: {"layer-0": {name: output}, …}."""
    outputs: dict[str, dict[str, Tensor]] = {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for index, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
            layer = outputs.setdefault(f"layer-{index}", {})
            for name in names:
                hooks.enter_context(getattr(block, name).register_forward_hook(functools.partial(_keep, layer, name)))
        model.eval()(tokens)
    return outputs


def _keep(outputs: dict[str, Tensor], name: str, module: torch.nn.Module, inputs: object, output: Tensor) -> None:
    """A forward hook that keeps the output under a name."""
    outputs[name] = output


def by_head(output: Tensor, num_heads: int) -> Tensor:
    """[B, n, E] -> [B, H, n, D]."""
    return output.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def attention_weights(
    query: Tensor, key: Tensor, slope: float, scale: float, rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (distances i − j, weights), each [R, n] in float64, for R = `rows` queries at a time; query, key [n, D]."""
    places = torch.arange(len(key), device=key.device)
    for start in range(0, len(key), rows):
        i = places[start : start + rows]
        distance = i[:, None] - places
        scores = scale * (query[i].double() @ key.double().T) - slope * distance
        yield distance, scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
