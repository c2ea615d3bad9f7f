"""The referee: fifteen position methods on text and four tasks, trained at 64 tokens and tested up to 1,024.

Paper: none; it applies the paper's question ("train short, test long") to text and to four tasks with exact answers:
recall, needles, copying and one bit of memory. Every training uses the same model, steps and order, with two seeds. A
task's documents are as long as its training examples.
"""

import dataclasses

from alibi_lab.lab.config import DataConfig, Method, Recipe, RunConfig, Scale, SymbolTask
from alibi_lab.lab.scales import LARGE, MEDIUM, SMALLER, TWO_STEPS, changed, trained_at

_NAMES = (
    "none sinusoidal rotary t5 alibi alibi-half kerple alibi-log sandwich tisa fire nope-window drope fox alibi-fox"
)
COMPARED: tuple[Method, ...] = tuple(_NAMES.split())
TASKS: tuple[SymbolTask | None, ...] = (None, "mqar", "needles", "copy", "flip-flop")  # None is language modeling
SEEDS = (0, 1)
_SMALL = changed(SMALLER, train={"steps": 2000, "warmup_steps": 200, "checkpoint_every": 1000})
_RUNS: dict[Scale, RunConfig] = {
    "smoke": trained_at(changed(TWO_STEPS, model={"num_layers": 2}), (32, 64), trials=2),
    "small": trained_at(_SMALL, (64, 128, 256, 512, 1024), tokens=32_768, trials=128),
    "medium": trained_at(MEDIUM, (128, 256, 512, 1024, 2048), tokens=65_536, trials=128),
    "paper": trained_at(LARGE, (512, 1024, 2048, 4096, 8192), {"steps": 5_000, "warmup_steps": 500}, trials=128),
}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Every task with every method; the two seeds of a training are adjacent, so that each of two shards gets one of them.

    `smoke` has one seed and every fifth method.
    """
    methods, seeds = (COMPARED[4::5], SEEDS[:1]) if scale == "smoke" else (COMPARED, SEEDS)
    return tuple(_run(task, method, seed, scale) for task in TASKS for method in methods for seed in seeds)


def _run(task: SymbolTask | None, method: Method, seed: int, scale: Scale) -> RunConfig:
    run = changed(_RUNS[scale], model={"method": method}, train={"seed": seed})
    if task is None:
        return run
    run = changed(run, model={"vocab_size": 256}, eval={"tokens": run.eval.lengths[-1], "tasks": (task,)})
    return dataclasses.replace(run, data=DataConfig(corpus=f"task:{task}:{run.train.length}"))


RECIPE = Recipe(
    name="referee",
    question="Which of text, recall, needles, copying and one bit can fifteen position methods learn, at 64 and at 1,024 tokens?",
    paper="none: section 2.2's question, asked of tasks with exact answers",
    cost=(
        "small: 150 trainings at two to two and a half minutes of one core each, tests included: five to six core-hours in all "
        "(steps of all methods timed); --ray: one per processor, --shard: one part; smoke: seconds; medium and paper: not run"
    ),
    expected=(
        "at 64 tokens, some method learns each task; at 1,024, ALiBi keeps text and the bit but loses distant tokens (the "
        "flattest of its four heads subtracts 4 nats from the first), a model without positions keeps more, rotary fails on "
        "text too; forget gates, which start at a half, learn recall late or never (docs/log.md)"
    ),
    runs=runs,
)
