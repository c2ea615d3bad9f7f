"""Small trainings: fields of a tiny model, the command that runs one, a recipe of given runs, and a trained checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from alibi_lab.lab import experiment
from alibi_lab.lab.config import EvalConfig, ModelConfig, Recipe, RunConfig, TrainConfig
from alibi_lab.lab.data.corpus import load_corpus
from alibi_lab.lab.training.checkpoint import Progress
from alibi_lab.lab.training.train import train

TINY = {"model.num_layers": "1", "model.embed_dim": "16", "model.num_heads": "2", "model.ffn_dim": "16"}
TINY |= {"train.length": "16", "train.batch_tokens": "64", "eval.lengths": "8,16", "eval.tokens": "32"}


def sets(fields: Mapping[str, str]) -> list[str]:
    """The options of `alibi run` that change these fields."""
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


def smoke_run(out: Path, fields: Mapping[str, str], *options: str) -> list[str]:
    """The arguments of `alibi` for ALiBi's run of the recipe quick at its smallest scale, with changed fields."""
    changes = sets({"model.method": "alibi", **fields})
    return ["run", "quick", "--scale", "smoke", "--no-report", *changes, *options, "--out", str(out)]


def recipe_of(*runs: RunConfig, name: str = "tiny", study: str = "") -> Recipe:
    texts = dict.fromkeys(("question", "paper", "command", "cost", "expected"), "")
    return Recipe(name=name, study=study, runs=lambda scale: runs, **texts)


def trained(config: RunConfig, folder: Path, **options: object) -> Progress:
    """`train` on the config's own text."""
    return train(config, load_corpus(config.data), folder, **options)


def checkpoint_of(folder: Path, method: str) -> Path:
    """The checkpoint of a small model, trained for a few steps."""
    model = ModelConfig(method=method, num_layers=2, num_heads=4, embed_dim=32, ffn_dim=40)
    train = TrainConfig(length=32, steps=4, batch_tokens=128, warmup_steps=2)
    small = RunConfig(model=model, train=train, eval=EvalConfig(lengths=(32,), tokens=64, batch_tokens=128))
    experiment.run(recipe_of(small), out=folder, scale="smoke")
    return next((folder / "checkpoints").rglob("step-*")).parent
