"""The referee: fifteen position methods on text and four tasks, trained at 64 tokens and tested up to 1,024.

Paper: none; it asks the paper's question ("train short, test long") of text and of four tasks with exact answers: recall,
needles, copying and one bit of memory. Every training uses the same model, steps and order, with two seeds. A task's documents
are as long as its training examples.
"""

import dataclasses

from alibi_attn.lab.config import (
    DataConfig,
    EvalConfig,
    Method,
    ModelConfig,
    Recipe,
    RunConfig,
    Scale,
    SymbolTask,
    TrainConfig,
)
from alibi_attn.recipes import large, medium

METHODS: tuple[Method, ...] = (
    "none",
    "sinusoidal",
    "rotary",
    "t5",
    "alibi",
    "alibi-half",
    "kerple",
    "alibi-log",
    "sandwich",
    "tisa",
    "fire",
    "nope-window",
    "drope",
    "fox",
    "alibi-fox",
)
TASKS: tuple[SymbolTask | None, ...] = (None, "mqar", "needles", "copy", "flip-flop")  # None is language modeling
SEEDS = (0, 1)


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Every task with every method; the two seeds of a training are adjacent, so that each of two shards gets one of them.

    `smoke` has one seed and every fifth method.
    """
    methods, seeds = (METHODS[4::5], SEEDS[:1]) if scale == "smoke" else (METHODS, SEEDS)
    return tuple(_run(task, method, seed, scale) for task in TASKS for method in methods for seed in seeds)


def _run(task: SymbolTask | None, method: Method, seed: int, scale: Scale) -> RunConfig:
    run = _of_scale(scale)
    train = dataclasses.replace(run.train, seed=seed)
    model = dataclasses.replace(run.model, method=method)
    if task is None:
        return dataclasses.replace(run, model=model, train=train)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(model, vocab_size=256),
        data=DataConfig(corpus=f"task:{task}:{train.length}"),
        train=train,
        eval=dataclasses.replace(run.eval, tokens=run.eval.lengths[-1], tasks=(task,)),
    )


def _of_scale(scale: Scale) -> RunConfig:
    if scale == "smoke":
        return RunConfig(
            model=ModelConfig(num_layers=2, num_heads=2, embed_dim=16, ffn_dim=24),
            train=TrainConfig(length=32, steps=2, batch_tokens=64, warmup_steps=1, log_every=1, checkpoint_every=2),
            eval=EvalConfig(lengths=(32, 64), tokens=64, batch_tokens=2048, trials=2),
        )
    if scale == "small":
        return RunConfig(
            model=ModelConfig(num_layers=2, num_heads=4, embed_dim=64, ffn_dim=168),
            train=TrainConfig(
                length=64, steps=2000, batch_tokens=4096, learning_rate=5e-3, warmup_steps=200, checkpoint_every=1000
            ),
            eval=EvalConfig(lengths=(64, 128, 256, 512, 1024), tokens=32_768, trials=128),
        )
    if scale == "medium":
        return RunConfig(
            model=medium.MODEL,
            data=medium.DATA,
            train=dataclasses.replace(medium.TRAIN, length=128),
            eval=EvalConfig(lengths=(128, 256, 512, 1024, 2048), tokens=65_536, trials=128),
        )
    return RunConfig(
        model=large.MODEL,
        train=dataclasses.replace(large.TRAIN, length=512, steps=5_000, warmup_steps=500),
        eval=EvalConfig(lengths=(512, 1024, 2048, 4096, 8192), tokens=262_144, batch_tokens=65_536, trials=128),
    )


RECIPE = Recipe(
    name="referee",
    question="Which of text, recall, needles, copying and one bit can fifteen position methods learn, at 64 and at 1,024 tokens?",
    paper="none: section 2.2's question, asked of tasks with exact answers",
    command="alibi run referee",
    cost=(
        "small: 150 trainings at two to two and a half minutes of one core each, tests included: five to six core-hours in all "
        "(steps of all methods timed); --jobs 2: two at a time, --shard: one part; smoke: seconds; medium and paper: not run"
    ),
    expected=(
        "at 64 tokens, some method learns each task; at 1,024, ALiBi keeps text and the bit but loses distant tokens (the "
        "flattest of its four heads takes 4 nats off the first one), no positions keep more of them, rotary loses text too; "
        "forget gates, which start at a half, learn recall late or never (docs/log.md)"
    ),
    runs=runs,
)
