"""A new recipe, complete: are two layers better than one?

    python examples/extending/recipe.py

runs it at smoke scale. To add it for good, copy this file without its last part to alibi_lab/recipes/, and add it to
`_FILES` of alibi_lab/recipes/index.py.
"""

from alibi_lab.lab.config import EvalConfig, ModelConfig, Recipe, RunConfig, Scale, TrainConfig


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """One training per depth."""
    train = TrainConfig(length=16, steps=2, batch_tokens=64, warmup_steps=1, log_every=1, checkpoint_every=2)
    return tuple(
        RunConfig(
            model=ModelConfig(num_layers=layers, num_heads=2, embed_dim=16, ffn_dim=24),
            train=train,
            eval=EvalConfig(lengths=(16, 32), tokens=32),
        )
        for layers in (1, 2)
    )


RECIPE = Recipe(
    runs=runs,
    name="made-up",
    question="Are two layers better than one?",
    paper="none",
    cost="seconds",
    expected="not after two steps",
)

if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    from alibi_lab.recipes import index

    index.RECIPES[RECIPE.name] = RECIPE
    with tempfile.TemporaryDirectory() as folder:
        for path in index.run(RECIPE.name, out=Path(folder), scale="smoke"):
            print(path.name)
