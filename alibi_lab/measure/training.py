"""`alibi bench training`: the share of the processor's matrix rate that training reaches (MFU), in fp32 and bf16, and where the
time is spent.

    utilization = FLOPs of the model in a step / seconds of the step / rate of a large matrix product     (MFU)

(Chowdhery et al. 2022, PaLM, appendix B, arXiv:2204.02311). The rate is not from a data sheet: it is that of
`torch.mm`, measured in the same run with the same threads and dtype. A step's products would reach it if they were
large and ran alone.

The steps are whole training steps: batch, forward, loss, backward, clipping, optimizer. Model, batch and training are those of
the recipe `quick` at the same scale, and its four methods are the default. Speed does not depend on the text, so the tokens are
random. accelerate supports one precision per process, so each precision has its own process; the two take turns, and one waits
while the other computes.

Cost: medium, a few minutes on one core; small, half a minute; smoke, seconds.
Expected: a larger share in fp32, where matrix products dominate a step, than in bf16, where they are a smaller part of it.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent

from alibi_attn.nn.linear.fastest import is_slow
from alibi_lab.lab.config import Method, Precision, RunConfig, check_choice
from alibi_lab.lab.data.corpus import random_corpus
from alibi_lab.lab.model.method_trial import try_imported_methods
from alibi_lab.lab.scales import MEDIUM, SMALL, SMOKE
from alibi_lab.lab.training.flops import DTYPES, attention_flops, linear_flops, multiplying_parameters
from alibi_lab.lab.training.parallel import prepare
from alibi_lab.lab.training.train import Step
from alibi_lab.lab.training.train import steps as train_steps
from alibi_lab.measure import timing
from alibi_lab.measure.harness import Config, Row, Rows, Say, keep

COMPARED: tuple[Method, ...] = ("alibi", "sinusoidal", "rotary", "t5")
# The scales of the recipe `quick` that fit on one CPU.
TRAININGS: Mapping[str, RunConfig] = {"smoke": SMOKE, "small": SMALL, "medium": MEDIUM}
PRECISIONS: Mapping[Precision, str] = {"no": "fp32", "bf16": "bf16"}  # and their names in a record
MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Forward and backward of torch's attention; ours as an autograd.Function (`attention/operators/operator.py`), and as operators.
ATTENTION = ("aten::scaled_dot_product", "aten::_scaled_dot_product", "_Attention", "alibi_attn::")
# Rounding a logit to bf16 costs at most 2⁻⁸ of it, and a loss is the difference of two such numbers; the rounding of earlier
# layers cancels in the mean over thousands of tokens.
LOSS_TOLERANCE = 2.0**-7
# A norm sums millions of gradients, each off by a few 2⁻⁸ in either direction; a missing or doubled gradient changes it by far
# more.
NORM_TOLERANCE = 2.0**-4
MATRIX_SIZE = 2048
FIRST_STEPS = 2  # whose losses and gradients are compared; the second one follows an update


def training(
    out: Path,
    *,
    scale: str = "medium",
    methods: Sequence[str] = COMPARED,
    lengths: Sequence[int] = (),
    threads: int = 1,
    repeats: int = 9,
    seconds: float = 300.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record, and returns its path.

    The record has a curve per method and precision ("alibi, bf16") with the columns of `utilization_row`, the shares of a
    step's time, and the first loss. The metrics are the ratios of fp32 to bf16 time.

    Args:
        scale: "smoke", "small" or "medium": model and batch of the recipes.
        methods: position methods; default alibi,sinusoidal,rotary,t5.
        lengths: training lengths, as in 128,768, which divide the scale's batch; default the length of the scale.
        threads: number of threads. Recipe costs are quoted for one.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds for all turns.

    Raises:
        ValueError: an unknown scale or method, a length that does not divide the batch, or a machine with an accelerator, on
            which the lab would train.
        RuntimeError: the first steps in bf16 differ from those in fp32, or a process died.
        FileExistsError: the record already exists; nothing is measured.
    """
    check_choice("scale", scale, tuple(TRAININGS))
    if threads < 1:
        raise ValueError(f"threads is {threads} but must be 1 or more")
    if torch.accelerator.is_available():
        raise ValueError(
            "this benchmark measures a CPU, but the lab would train on this machine's accelerator; hide it, for example with "
            "CUDA_VISIBLE_DEVICES="
        )
    configs = _configs(scale, methods, lengths, FIRST_STEPS + repeats + 2)
    try_imported_methods(configs)
    name = f"training/{scale}"
    metrics: dict[str, float | None] = {}

    def steps() -> Iterator[Mapping[str, Rows]]:
        with contextlib.ExitStack() as stack:
            pools = {precision: stack.enter_context(timing.fresh_process(threads)) for precision in PRECISIONS}
            losses: dict[str, float] = {}
            for config in configs:
                first = {precision: _call(pool, _first, _at(config, precision)) for precision, pool in pools.items()}
                expect_agreement(_name(config), *first.values())
                losses |= {_name(config, precision): steps[0][0] for precision, steps in first.items()}
            calls: dict[str, Callable[[], float]] = {}
            for precision, pool in pools.items():
                calls[f"matrix product, {precision}"] = functools.partial(_call, pool, _product_ms, precision)
                for config in configs:
                    step_ms = functools.partial(_call, pool, _of_step, timing.elapsed_ms, _at(config, precision))
                    calls[_name(config, precision)] = step_ms
            times = timing.medians_of(calls, operator.call, repeats=repeats, seconds=seconds)
            for config in configs:
                metrics[f"{_name(config)}, fp32 / bf16"] = times[_name(config, "no")] / times[_name(config, "bf16")]
                rows: dict[str, Row] = {}
                for precision, pool in pools.items():
                    label = _name(config, precision)
                    row = utilization_row(config, times[label], times[f"matrix product, {precision}"])
                    row |= _call(pool, _of_step, profiled_shares, _at(config, precision))
                    rows[f"{config.model.method}, {PRECISIONS[precision]}"] = {**row, "loss_nats": losses[label]}
                yield {name: rows}

    return keep(out, {name: _config(configs, scale, threads)}, steps(), summary=lambda name, columns: metrics, say=say)


def _configs(scale: str, methods: Sequence[str], lengths: Sequence[int], least_steps: int) -> list[RunConfig]:
    """The configs to measure, sorted by length and then in the order of the methods.

    Raises:
        ConfigError: an unknown method, or a length that does not divide the batch.
    """
    model, train = TRAININGS[scale].model, TRAININGS[scale].train
    train = dataclasses.replace(train, steps=max(train.steps, least_steps))
    return [
        RunConfig(model=dataclasses.replace(model, method=method), train=dataclasses.replace(train, length=length))
        for length in sorted(set(lengths)) or [train.length]
        for method in dict.fromkeys(methods)
    ]


def _config(configs: Sequence[RunConfig], scale: str, threads: int) -> Config:
    model = dataclasses.asdict(configs[0].model)
    train = configs[0].train
    return {
        "scale": scale,
        "methods": list(dict.fromkeys(config.model.method for config in configs)),
        "lengths": sorted({config.train.length for config in configs}),
        "model": {name: value for name, value in model.items() if name != "method"},
        "batch_tokens": train.batch_tokens,
        "optimizer": train.optimizer,
        "parameters": multiplying_parameters(configs[0].model),
        "precisions": list(PRECISIONS.values()),
        "threads": threads,
        "matrix_size": MATRIX_SIZE,
        "tolerances": {"loss": LOSS_TOLERANCE, "gradient_norm": NORM_TOLERANCE},
    }


def _at(config: RunConfig, precision: Precision) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, precision=precision))


def _name(config: RunConfig, precision: Precision | None = None) -> str:
    name = f"{config.model.method}-{config.train.length}"
    return name if precision is None else f"{name}, {PRECISIONS[precision]}"


def _call(pool: Executor, function: Callable[..., timing.Result], *arguments: object) -> timing.Result:
    """Runs the function in the pool's process."""
    return timing.result(pool.submit(function, *arguments), "a training process", "pass a smaller --scale")


@functools.cache
def product_in(precision: Precision) -> Callable[[], object]:
    """A matrix product, which measures the machine's current speed when it is timed in turn with a training.

    It has the dtype in which the training multiplies: fp32 if this CPU has no instructions for the other dtype.
    """
    dtype = DTYPES[precision]
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE).to(torch.float32 if is_slow(dtype) else dtype)
    return lambda: a @ b


def utilization_row(config: RunConfig, step_ms: float, product_ms: float) -> Row:
    """The columns of one config, from the times of its step and of a matrix product."""
    linear, attention = linear_flops(config), attention_flops(config)
    achieved, rate = (linear + attention) / step_ms / 1e6, 2 * MATRIX_SIZE**3 / product_ms / 1e6
    return {
        "length": config.train.length,
        "step_ms": step_ms,
        "tokens_per_second": config.train.batch_tokens / step_ms * 1e3,
        "linear_flops": linear,
        "attention_flops": attention,
        "achieved_gflops": achieved,
        "matrix_gflops": rate,
        "utilization": achieved / rate,
    }


def expect_agreement(name: str, wide: Sequence[tuple[float, float]], half: Sequence[tuple[float, float]]) -> None:
    """Compares the first steps of a training in bf16 with those in fp32; a step is (loss, gradient norm).

    Raises:
        RuntimeError: they differ by more than the rounding of bf16.
    """
    allowed = (("loss", LOSS_TOLERANCE), ("gradient's norm", NORM_TOLERANCE))
    for step, (expected, half_step) in enumerate(zip(wide, half, strict=True), start=1):
        for (what, most), true, ours in zip(allowed, expected, half_step, strict=True):
            if not abs(ours - true) <= most * abs(true):
                raise RuntimeError(
                    f"{name} is wrong: at step {step} the {what} is {true:.6g} in fp32 and {ours:.6g} in bf16 but may "
                    f"differ by at most {most:.2g} of it"
                )


def profiled_shares(step: Callable[[], object]) -> Row:
    """The shares of a profiled step's time. Profiling slightly slows down everything except matrix products."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # The self time of "step" is Python's, between the operators.
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("step"):
        step()
    return time_shares(profile.events())


def time_shares(events: Iterable[FunctionEvent]) -> Row:
    """The shares of time of matrix products, of attention and of everything else.

    Attention is the operators of ATTENTION and everything they call. Matrix products are MATRIX_PRODUCTS outside of it.
    Attention that is computed by ordinary operators (short calls, dense biases) counts as matrix products and everything else.
    """
    spent = {"matrix_time_share": 0.0, "attention_time_share": 0.0, "other_time_share": 0.0}
    for event in events:
        above: FunctionEvent | None = event
        while above is not None and not above.name.startswith(ATTENTION):
            above = above.cpu_parent
        kind = "attention" if above is not None else "matrix" if event.name in MATRIX_PRODUCTS else "other"
        spent[f"{kind}_time_share"] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {name: time / whole for name, time in spent.items()}


# The functions below run in the process of one precision. The caches keep its trainings between calls.


@functools.cache
def _training(config: RunConfig) -> Iterator[Step]:
    return train_steps(prepare(config), random_corpus(config.model.vocab_size, 4 * config.train.batch_tokens + 1))


def _first(config: RunConfig) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each of the first steps."""
    return [(step.loss_nats, step.gradient_norm) for step in itertools.islice(_training(config), FIRST_STEPS)]


def _of_step(measure: Callable[[Callable[[], object]], timing.Result], config: RunConfig) -> timing.Result:
    return measure(functools.partial(next, _training(config)))


def _product_ms(precision: Precision) -> float:
    return timing.elapsed_ms(product_in(precision))
