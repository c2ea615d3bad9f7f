"""The referee: what is each position method good for? Fifteen, on a text and four tasks, trained at 64 and tested to 1,024.

Paper: none; its question ("train short, test long") for text, and for recall, needles, copying and one bit of memory, whose
answers are exact. Every training has the same model, steps, order and two seeds; a task's documents are as long as its
training examples.
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
    """Task by task, method by method; the two seeds of one come one after the other, so that two shards have one each.

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
    question="What is each of fifteen position methods good for: text, recall, needles, copies, one bit; at 64 and 1,024 tokens?",
    paper="none: section 2.2's question for tasks whose answers are exact",
    command="alibi run referee",
    cost=(
        "small: 150 trainings, two to two and a half minutes of one core each, tests included, so five to six hours of a core in "
        "all (steps of all methods timed); --jobs 2: two at a time, --shard: parts; smoke: seconds; medium and paper: not run"
    ),
    expected=(
        "every task is learned at 64 tokens by some method; at 1,024 ALiBi keeps text and the bit and loses what stands far "
        "back (its flattest head of four takes 4 nats from the first token), no positions keep more of that, rotary loses text "
        "too; forget gates, which start at a half, learn recall late or not at all (docs/log.md)"
    ),
    runs=runs,
)
