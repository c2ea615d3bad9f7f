"""`alibi bench models`: whole models: a pass, a token with a long cache, or after a prompt: ours, transformers, other programs.

Random weights. Logits or hidden states are compared before anything is timed: in fp32 with the original's, in other precisions
with the same, so that `error` is what int8 or float8 costs. On a CPU every pass has its own process, to measure its memory.
"""

import dataclasses
import itertools
import math
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import DynamicCache

from alibi_attn.hf import ALiBiCache, patch
from alibi_attn.nn.linear import quantized
from alibi_lab.measure import model_programs as programs
from alibi_lab.measure import timing
from alibi_lab.measure.harness import GRAPH, Config, Say, Timed, check_names, keep
from alibi_lab.measure.model_programs import OURS, Setting
from alibi_lab.measure.peers import missing
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.peers.llama_cpp import Crash

# The largest error of outputs that is still their precision, as a share of the norm of the true ones.
MOST_ERROR = {"float32": 1e-3, "bfloat16": 5e-2, "int8": 1e-1, "float8": 1e-1}
ATTENTION = (  # classes of layers
    *("BloomAttention", "MptAttention", "FalconAttention", "T5Attention"),
    *("ALiBiBertSelfAttention", "DenseSelfAttention", "BertSelfAttention"),
)
WARM_UP = 256  # tokens, long enough to take the same code path
ROOM = 1024  # tokens that a static cache holds beyond those before the measurement
PADDING = 1 / 8  # padding positions per cached token


def models(
    out: Path,
    *,
    models: Sequence[str] = ("bloom",),
    parts: Sequence[str] = ("pass",),
    precisions: Sequence[str] = ("float32", "bfloat16"),
    lengths: Sequence[int] = (512, 2048, 8192),
    texts: Sequence[int] = (),
    layers: int = 0,
    width: int = 0,
    vocabulary: int = 0,
    device: str = "cpu",
    tokens: int = 32,
    rounds: int = 3,
    seconds: float = 10.0,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record per model, part and precision, and returns their paths.

    Args:
        models: of bloom, mpt, falcon, t5, encoder (Jina's, base size); default bloom.
        parts: of pass; step, a token with a cache of random keys; prompt, a token after a prompt. Default pass.
        precisions: of float32, bfloat16, int8, float8; default float32,bfloat16.
        lengths: lengths of texts, caches or prompts; default 512,2048,8192.
        texts: instead, the lengths of the texts of one batch, which most programs pad to the longest.
        layers: default 2, of the encoder 12.
        width: default 1024, of the encoder 768; heads have size 64.
        vocabulary: number of tokens; default 1000, of the encoder 30528.
        device: "cpu" or "cuda", where graphs are measured too.
        tokens: tokens per run of "prompt"; their mean is one measurement.
        rounds: processes per program; runs of a step, in turns with those of the others.
        seconds: time limit in seconds per process and length, after which no pass starts.

    Raises:
        RuntimeError: our outputs are wrong; the records are kept.
        ValueError: this machine has no products in a precision; nothing is measured.
    """
    check_names(models=(models, programs.MODELS), parts=(parts, PARTS), precisions=(precisions, programs.ALL))
    for kind in ("int8", "float8"):
        if kind in precisions:
            quantized.check_supported(kind, device)
    batches = [tuple(texts)] if texts else [(length,) for length in sorted(lengths)]
    settings: dict[str, tuple[str, Setting]] = {}
    configs: dict[str, Config] = {}
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as folder:
        for model, part, precision in itertools.product(models, parts, precisions):
            if part != "pass" and model != "bloom":
                raise ValueError(f"part {part} measures bloom, not {model}; pass --models bloom")
            usual = Sizes() if model == programs.ENCODER else Sizes.of(2, 1024, 1000)
            sizes = Sizes.of(layers or usual.layers, width or usual.width, vocabulary or usual.vocabulary)
            name = f"models/{model}-{part}{'-mixed' if texts else ''}-{precision}{'' if device == 'cpu' else '-cuda'}"
            settings[name] = part, Setting(
                model=model, sizes=sizes, precision=precision, device=device, threads=torch.get_num_threads(),
                folder=Path(folder), tokens=tokens, rounds=rounds, seconds=seconds,
            )  # fmt: skip
            configs[name] = {
                **dataclasses.asdict(sizes), "model": model, "part": part, "precision": precision, "device": device,
                "lengths": list(lengths), "texts": list(texts), "tokens": tokens, "rounds": rounds,
                "threads": torch.get_num_threads(),
            }  # fmt: skip

        steps = (
            {name: PARTS[part](dataclasses.replace(setting, batch=batch))}
            for name, (part, setting) in settings.items()
            for batch in batches
        )
        return keep(out, configs, steps, say=say)


def inputs(setting: Setting, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(token ids, mask) of random texts of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(sum(batch))
    ids = torch.randint(1, setting.sizes.vocabulary, (len(batch), max(batch)), generator=generator)
    mask = (torch.arange(max(batch)) < torch.tensor(batch)[:, None]).long()
    return (ids * mask).to(setting.device), mask.to(setting.device)


def passes(setting: Setting) -> dict[str, Timed]:
    """A forward pass of every program over a batch: first compared, then timed."""
    rows = dict[str, Timed]()
    in_process: Callable[..., Any] = timing.in_fresh_process if setting.device == "cpu" else operator.call
    numbers = len(setting.batch) * setting.sizes.heads * setting.room**2
    truth = programs.TRUTH[setting.model]
    if timing.too_large(4 * programs.PROGRAMS[truth].arrays * numbers) is not None:
        truth = OURS
    true, _, _ = in_process(run_pass, truth, dataclasses.replace(setting, precision="float32", seconds=0.0))
    for name, program in programs.PROGRAMS.items():
        if setting.model not in program.models or setting.precision not in program.precisions:
            continue
        rows[name] = row = Timed(length=setting.room, tokens=sum(setting.batch))
        row.why_not = missing(program.needs) or timing.too_large(4 * program.arrays * numbers)
        times = list[tuple[float, float]]()
        for _ in range(0 if row.why_not else setting.rounds):
            try:
                output, peak, spent = in_process(run_pass, name, setting)
            except (RuntimeError, Crash) as refusal:
                row.right, row.why_not = (False if name == OURS else None), str(refusal).splitlines()[0]
                break
            row.peak_memory_bytes = max(row.peak_memory_bytes or 0, peak)
            times += spent
            if setting.model in program.compared:
                compare(row, output, true, max(MOST_ERROR[setting.precision], program.most_error))
            if row.why_not is not None:
                break
        if row.why_not is None:
            whole, part = (statistics.median(column) for column in zip(*times, strict=True))
            row.forward_ms, row.attention_share = 1e3 * whole, part / whole if part else None
    return rows


def run_pass(name: str, setting: Setting) -> tuple[Tensor, int, list[tuple[float, float]]]:
    """(outputs of at most 512 tokens per text, added peak memory, seconds of each pass and of these in attention)."""
    before, attention, spent = timing.peak_rss_bytes(), [0.0], list[tuple[float, float]]()
    on_gpu = setting.device == "cuda"
    with torch.inference_mode():
        run = programs.PROGRAMS[name].open(setting)
        if isinstance(run, nn.Module) and not on_gpu:
            timing.time_attention(run, ATTENTION, attention)
        ids, mask = inputs(setting, setting.batch)
        run(*inputs(setting, [min(WARM_UP, setting.room)]))
        end = time.perf_counter() + setting.seconds
        while not spent or (len(spent) < 3 and time.perf_counter() < end):
            attention[0], start = 0.0, time.perf_counter()
            output = run(ids, mask)
            if on_gpu:
                torch.cuda.synchronize()
            spent.append((time.perf_counter() - start, attention[0]))
    shown = output[mask.bool()] if output.ndim == 3 else output
    return shown[:512].float().cpu(), timing.peak_raised_by(before), spent


def relative_error(output: Tensor, true: Tensor) -> float:
    """The norm of the difference as a share of that of the true numbers."""
    return float((output.double() - true.double()).norm() / true.double().norm())


def compare(row: Timed, output: Tensor, true: Tensor, most: float) -> None:
    """Fills the error of a row, and why it is not timed if the error is larger than this."""
    row.error = relative_error(output, true)
    row.right = row.error <= most
    if not row.right:
        row.why_not = f"it is off by {row.error:.1e} of the norm of the true outputs"


@torch.inference_mode()
def cached_steps(setting: Setting) -> dict[str, Timed]:
    """A token of a BLOOM whose cache holds random keys: with the caches of `transformers` and ours, also after padding.

    The cache of `generate` copies all keys for each token; its StaticCache does not. The batch of two rows has no padding, the
    same tokens after padding of an eighth of their length, or a mask that shows only the last quarter of one of them.
    """
    length, config = setting.room, setting.sizes
    first, ours = (programs.original_model(setting).to(setting.device, setting.dtype) for _ in range(2))
    patch(ours)
    torch.manual_seed(1)
    shape = 1, config.heads, length, config.width // config.heads
    filling = [tuple(torch.randn(shape).to(setting.device, setting.dtype) for _ in "kv") for _ in range(config.layers)]
    room = length + ROOM
    static = StaticCache(config=first.config, max_cache_len=room)
    whole = torch.ones(1, room, dtype=torch.long, device=setting.device)
    one, two = (torch.tensor(rows, device=setting.device) for rows in ([[7]], [[7], [8]]))
    calls = {
        OURS: _step(ours, ALiBiCache(), filling, one),
        "ours, static cache": _step(ours, ALiBiCache(capacity=room), filling, one),
        "patched, DynamicCache": _step(ours, DynamicCache(), filling, one),
        "transformers": _step(first, DynamicCache(), filling, one),
        "transformers, StaticCache": _step(first, static, filling, one, whole),
    }
    padding = max(int(length * PADDING), 1)
    rows = [tuple(torch.cat([x, x.flip(1)]) for x in part) for part in filling]
    padded = [tuple(nn.functional.pad(x, (0, 0, padding, 0), value=9.0) for x in part) for part in rows]
    at = torch.arange(padding + length + 1, device=setting.device)
    even = torch.stack([at >= padding] * 2).long()
    uneven = torch.stack([at >= padding, at >= padding + length - length // 4]).long()
    two_rows = {
        "ours, two rows": _step(ours, ALiBiCache(), rows, two),
        "ours, two padded rows": _step(ours, ALiBiCache(), padded, two, even),
        "ours, one row a quarter as long": _step(ours, ALiBiCache(), padded, two, uneven),
    }
    calls |= two_rows if length <= 32768 else {}
    truth = {name: "ours, two rows" if name in two_rows else "transformers" for name in calls}
    outputs = {name: call() for name, call in calls.items()}
    found = {}
    for name, output in outputs.items():
        row = found[name] = Timed(length=length, tokens=len(output))
        compared = 1 if "quarter" in name else None
        compare(row, output[:compared], outputs[truth[name]][:compared], MOST_ERROR[setting.precision])
    device = torch.device(setting.device)
    if device.type == "cuda":
        calls["ours, static cache" + GRAPH] = timing.replayable(calls["ours, static cache"], device)
        found["ours, static cache" + GRAPH] = dataclasses.replace(found["ours, static cache"])
    right = {name: call for name, call in calls.items() if found[name].right}
    repeats, seconds = 3 * setting.rounds, 3 * setting.seconds
    for name, ms in timing.medians_of(right, timing.timer(device), repeats=repeats, seconds=seconds).items():
        found[name].forward_ms = ms
    return found


def _step(
    model: nn.Module, cache: Any, filling: Sequence[Sequence[Tensor]], token: Tensor, mask: Tensor | None = None
) -> Callable[[], Tensor]:
    """A call that decodes one token per row and removes it from the cache, which holds these keys and values.

    Static caches keep it and have room for all.
    """
    for layer, (key, value) in enumerate(filling):
        cache.update(key, value, layer)

    def call() -> Tensor:
        logits: Tensor = model(token, attention_mask=mask, past_key_values=cache).logits[:, -1]
        if cache.get_max_length() < 0:
            cache.crop(-1)
        return logits

    return call


@torch.inference_mode()
def after_prompt(setting: Setting) -> dict[str, Timed]:
    """The mean time of a token after a prompt, by program; all read the same prompt and then the same tokens."""
    listed, tokens = inputs(setting, [setting.room])[0][0].cpu().tolist(), setting.tokens
    again = [*listed, listed[-1]]
    roomy = dataclasses.replace(setting, batch=(len(again) + tokens,))
    true = Patched(dataclasses.replace(setting, precision="float32")).logits(again)
    rows, calls = dict[str, Timed](), dict[str, Callable[[], float]]()
    for name, needs in {OURS: (), **(programs.BLOOMS if setting.device == "cpu" else {})}.items():
        row = rows[name] = Timed(length=len(listed), tokens=tokens, why_not=missing(needs))
        if row.why_not is not None:
            continue
        try:
            program = Patched(setting) if name == OURS else programs.opened(name, roomy)
        except (Crash, ValueError) as refusal:  # CTranslate2 has no bf16 on a CPU
            row.why_not = str(refusal)
            continue
        compare(row, torch.from_numpy(program.logits(again)), torch.from_numpy(true), MOST_ERROR[setting.precision])
        if row.right:
            calls[name] = program.several(listed, tokens)
    for name, seconds in timing.medians_of(calls, operator.call, repeats=setting.rounds, seconds=math.inf).items():
        rows[name].forward_ms = 1e3 * seconds
    return rows


class Patched:
    """Our BLOOM, as the other programs that run one."""

    def __init__(self, setting: Setting) -> None:
        self.model = programs.patched(setting)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits [V] of the last token; the others stay in the cache."""
        ids = torch.tensor([tokens], device=self.model.device)
        self.cache, self.last = ALiBiCache(), ids[:, -1:]
        self.model(ids[:, :-1], past_key_values=self.cache, logits_to_keep=1)
        logits: Tensor = self.model(self.last, past_key_values=self.cache).logits[0, -1].float().cpu()
        self.cache.crop(-1)
        return logits.numpy()

    def several(self, tokens: Sequence[int], count: int) -> Callable[[], float]:
        """Mean seconds of a step after these tokens, which `logits` has left in the cache."""

        def call() -> float:
            start = time.perf_counter()
            for _ in range(count):
                logits = self.model(self.last, past_key_values=self.cache).logits
            logits.cpu()  # waits for a GPU
            seconds = time.perf_counter() - start
            self.cache.crop(-count)
            return seconds / count

        return call


PARTS = {"pass": passes, "step": cached_steps, "prompt": after_prompt}
