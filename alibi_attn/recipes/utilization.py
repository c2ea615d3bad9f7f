"""What share of the machine's matrix rate does a training of the lab reach, in fp32 and in bf16?

Paper: none; model FLOPs utilization is of PaLM (Chowdhery et al. 2022, appendix B, arXiv:2204.02311). The steps are those of
`lab/train.py`, whole: batch, forward, loss, backward, clipping, optimizer. Model, batch and training are those of the recipe
`quick` at the same scale, whose four methods are asked; speed does not depend on the text, so the tokens are random. accelerate
knows one precision a process, so each precision has a process, and these take turns: one works while the other waits.

Command: `alibi bench training`. Cost: medium, some minutes of one core; small, half a minute; smoke, seconds.
Expected: a larger share in fp32, where products are most of a step, than in bf16, where they take less of it.
"""

import concurrent.futures.process
import contextlib
import dataclasses
import datetime
import functools
import multiprocessing
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from alibi_attn import records
from alibi_attn.bench.columns import Columns, append
from alibi_attn.bench.timing import MATRIX_SIZE, elapsed_ms, matrix_product, medians_told
from alibi_attn.bench.training import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    ModelFlops,
    expect_agreement,
    profiled_shares,
    utilization_row,
)
from alibi_attn.lab.config import ModelConfig, RunConfig, check_choice
from alibi_attn.lab.data import Corpus
from alibi_attn.lab.parallel import prepare
from alibi_attn.lab.train import Step, steps
from alibi_attn.nn.linear import is_slow
from alibi_attn.recipes import quick

Size: TypeAlias = Literal["smoke", "small", "medium"]  # the scales that one processor trains at
Precision: TypeAlias = Literal["no", "bf16"]
Pool: TypeAlias = concurrent.futures.process.ProcessPoolExecutor
METHODS = ("alibi", "sinusoidal", "rotary", "t5")
PRECISIONS: Mapping[Precision, tuple[str, torch.dtype]] = {
    "no": ("fp32", torch.float32),
    "bf16": ("bf16", torch.bfloat16),
}
_Answer = typing.TypeVar("_Answer")
FIRST_STEPS = 2  # whose losses and gradients are compared; the second is after an update


def training_utilization(
    out: Path,
    *,
    scale: str = "medium",
    methods: Sequence[str] = METHODS,
    lengths: Sequence[int] = (),
    threads: int = 1,
    repeats: int = 9,
    budget_s: float = 300.0,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure and keep one record; returns its path.

    The record has a curve for every method and precision ("alibi, bf16"), with the columns of `utilization_row`, the shares of a
    step's time and the first loss; the metrics say how many times longer fp32 takes.

    Args:
        lengths: tokens of a training example, which divide the scale's batch; none = as the scale trains.
        threads: of steps and of matrix products; 1 is what the costs of recipes are quoted for ("one core").
        repeats, budget_s: turns at most, and seconds at most that they may take.

    Raises:
        ValueError: another scale, an unknown method, a length that does not divide the batch, or a machine that would not train
            on its processor.
        RuntimeError: the first steps in bf16 are not those in fp32; or a process died.
        FileExistsError: the record is there already; nothing is measured.
    """
    check_choice("scale", scale, typing.get_args(Size))
    if threads < 1:
        raise ValueError(f"threads is {threads} but must be 1 or more")
    if torch.accelerator.is_available():
        raise ValueError(
            "this machine has an accelerator, on which the lab would train, but a processor is what is measured; hide it, as "
            "with CUDA_VISIBLE_DEVICES="
        )
    configs = _configs(typing.cast(Size, scale), methods, lengths, FIRST_STEPS + repeats + 2)
    name, asked = f"training/{scale}", _asked(configs, scale, threads)
    records.expect_new(out, "benchmark", name, asked)
    started = datetime.datetime.now(datetime.UTC)
    with contextlib.ExitStack() as stack:
        pools = {precision: stack.enter_context(_process(threads)) for precision in PRECISIONS}
        losses = _first_losses(pools, configs)
        calls: dict[str, Callable[[], float]] = {}
        for precision, pool in pools.items():
            calls[_product(precision)] = functools.partial(_told, pool, _product_ms, precision)
            for config in configs:
                calls[_name(config, precision)] = functools.partial(_told, pool, _step_ms, _at(config, precision))
        taken = medians_told(calls, repeats=repeats, budget_s=budget_s)
        columns: Columns = {}
        for config in configs:
            for precision, pool in pools.items():
                found, words = _name(config, precision), PRECISIONS[precision][0]
                row = utilization_row(model_flops(config), taken[found], taken[_product(precision)])
                row |= _told(pool, _shares, _at(config, precision))
                append(columns, f"{config.model.method}, {words}", {**row, "loss_nats": losses[found]})
                say(_said(found, row))
    metrics: dict[str, float | None] = {
        f"{_name(config)}, fp32 / bf16": taken[_name(config, "no")] / taken[_name(config, "bf16")] for config in configs
    }
    made = records.make("benchmark", name, config=asked, metrics=metrics, curves=columns, started=started)
    return records.save(made, out)


def model_flops(config: RunConfig) -> ModelFlops:
    """What a step of this training asks for; of a model with one plain embedding."""
    model, train = config.model, config.train
    return ModelFlops(
        parameters=multiplying_parameters(model),
        layers=model.num_layers,
        heads=model.num_heads,
        head_dim=model.embed_dim // model.num_heads,
        rows=train.batch_tokens // train.length,
        length=train.length,
    )


def multiplying_parameters(model: ModelConfig) -> int:
    """q, k, v and output, the feed-forward part (three matrices in "modern"), and the projection to the vocabulary."""
    feed_forward = (3 if model.architecture == "modern" else 2) * model.ffn_dim
    return (
        model.num_layers * model.embed_dim * (4 * model.embed_dim + feed_forward) + model.vocab_size * model.embed_dim
    )


def _configs(scale: Size, methods: Sequence[str], lengths: Sequence[int], least_steps: int) -> list[RunConfig]:
    """By length, then by method.

    Raises:
        ConfigError: an unknown method, or a length that does not divide the batch.
    """
    base = quick.runs(scale)[0]
    train = dataclasses.replace(base.train, steps=max(base.train.steps, least_steps))
    return [
        dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, method=method),
            train=dataclasses.replace(train, length=length),
        )
        for length in sorted(set(lengths)) or [train.length]
        for method in dict.fromkeys(methods)
    ]


def _asked(configs: Sequence[RunConfig], scale: str, threads: int) -> dict[str, records.Json]:
    model = dataclasses.asdict(configs[0].model)
    return {
        "scale": scale,
        "methods": list(dict.fromkeys(config.model.method for config in configs)),
        "lengths": sorted({config.train.length for config in configs}),
        "model": {name: value for name, value in model.items() if name != "method"},
        "batch_tokens": configs[0].train.batch_tokens,
        "optimizer": configs[0].train.optimizer,
        "parameters": multiplying_parameters(configs[0].model),
        "precisions": [name for name, _ in PRECISIONS.values()],
        "threads": threads,
        "matrix_size": MATRIX_SIZE,
        "tolerances": {"loss": LOSS_TOLERANCE, "gradient_norm": NORM_TOLERANCE},
    }


def _first_losses(pools: Mapping[Precision, Pool], configs: Sequence[RunConfig]) -> dict[str, float]:
    """The loss of every training's first step, by `_name`; raises RuntimeError where the precisions do not agree."""
    losses: dict[str, float] = {}
    for config in configs:
        first = {precision: pool.submit(_first, _at(config, precision)) for precision, pool in pools.items()}
        found = {precision: _answer(future) for precision, future in first.items()}
        expect_agreement(_name(config), found["no"], found["bf16"])
        losses |= {_name(config, precision): taken[0][0] for precision, taken in found.items()}
    return losses


def _at(config: RunConfig, precision: Precision) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision))


def _name(config: RunConfig, precision: Precision | None = None) -> str:
    name = f"{config.model.method}-{config.train.length}"
    return name if precision is None else f"{name}, {PRECISIONS[precision][0]}"


def _product(precision: Precision) -> str:
    return f"matrix product, {PRECISIONS[precision][0]}"


def _said(name: str, row: Mapping[str, records.Json]) -> str:
    return (
        f"{name}: {row['step_ms']:.0f} ms a step, {row['tokens_per_second']:,.0f} tokens/s, {row['achieved_gflops']:.0f} of "
        f"{row['matrix_gflops']:.0f} GFLOP/s: {row['utilization']:.1%}; time in matrix products {row['matrix_time_share']:.0%}, "
        f"attention {row['attention_time_share']:.0%}, everything else {row['other_time_share']:.0%}"
    )


def _process(threads: int) -> Pool:
    """A process of its own, which computes with so many threads."""
    context = multiprocessing.get_context("spawn")
    return Pool(1, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))


def _told(pool: Pool, function: Callable[..., _Answer], *arguments: object) -> _Answer:
    """What the function returns in the pool's process."""
    return _answer(pool.submit(function, *arguments))


def _answer(future: "concurrent.futures.Future[_Answer]") -> _Answer:
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool:
        raise RuntimeError(
            "a training's process died, most likely for lack of memory; pass a smaller --scale"
        ) from None


# What follows runs in the process of a precision, which keeps its trainings from call to call.


@functools.cache
def _training(config: RunConfig) -> Iterator[Step]:
    tokens = torch.randint(
        config.model.vocab_size, (4 * config.train.batch_tokens + 1,), generator=torch.Generator().manual_seed(0)
    ).to(torch.int32)
    corpus = Corpus(train=tokens, valid=tokens[:0], facts={"name": "random"})
    return steps(prepare(config), config, corpus)


def _first(config: RunConfig) -> list[tuple[float, float]]:
    """The losses and the gradients' norms of the first steps."""
    taken = [next(_training(config)) for _ in range(FIRST_STEPS)]
    return [(step.loss_nats, step.gradient_norm) for step in taken]


def _step_ms(config: RunConfig) -> float:
    return elapsed_ms(functools.partial(next, _training(config)))


def _shares(config: RunConfig) -> dict[str, records.Json]:
    return profiled_shares(functools.partial(next, _training(config)))


@functools.cache
def _operands(precision: Precision) -> Callable[[], object]:
    """Of the dtype in which the training multiplies: of bf16 that is fp32 where the processor has no products in bf16."""
    dtype = PRECISIONS[precision][1]
    return matrix_product(torch.float32 if is_slow(dtype) else dtype)


def _product_ms(precision: Precision) -> float:
    return elapsed_ms(_operands(precision))
