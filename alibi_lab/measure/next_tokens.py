"""`alibi bench next-tokens`: decode tokens after a prompt with a BLOOM in fp32, bf16 and int8, compared with llama.cpp and
CTranslate2.

One sequence, random weights, by default two layers of width 1,024. Every program reads the same prompt and
then the same tokens, one at a time; the mean of a run counts, and runs take turns. The logits of the first token are compared
with ours in fp32 before anything is timed, because a program that computes something else is not comparable.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import BloomForCausalLM

from alibi_attn.hf import ALiBiCache, patch
from alibi_lab.measure.harness import Config, Row, Rows, Say, keep_by_length
from alibi_lab.measure.peers import programs
from alibi_lab.measure.peers.llama_cpp import Crash
from alibi_lab.measure.peers.transformers_decoders import HEADS, bloom
from alibi_lab.measure.serving import error
from alibi_lab.measure.timing import medians_of

LENGTHS = (512, 2048, 8192)
OURS = "ours"
# By precision: the largest error of a program's logits that is still its precision, as a share of the largest logit.
PRECISIONS: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 5e-2}
Model = Callable[[], BloomForCausalLM]
NOT_IN = {"CTranslate2": ("bfloat16",)}  # on a CPU


def next_tokens(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = 32,
    width: int = 1024,
    layers: int = 2,
    vocabulary: int = 1000,
    repeats: int = 5,
    say: Say = print,
) -> list[Path]:
    """Measures, saves one record, and returns its path.

    Args:
        lengths: lengths of the prompt; default 512,2048,8192.
        tokens: tokens per run; their mean is one measurement.
        width: width of the random BLOOM, a multiple of 16.
        layers: layers of the random BLOOM; BLOOM-560m has 24.
        vocabulary: its number of tokens; BLOOM-560m has 250880.
        repeats: runs per program; the median counts.
    """
    peers = programs.installed(say)
    config: Config = {
        "lengths": sorted(lengths),
        "tokens": tokens,
        "layers": layers,
        "width": width,
        "heads": HEADS,
        "batch": 1,
        "vocabulary": vocabulary,
        "precisions": list(PRECISIONS),
        "peers": list(peers),
        "repeats": repeats,
        "threads": torch.get_num_threads(),
    }
    metrics: dict[str, float | None] = {}
    model = functools.partial(bloom, width, layers=layers, vocabulary=vocabulary)

    def measure(kind: str, length: int) -> Rows:
        prompt = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            true = _Ours("float32", model, prompt).logits()
            rows: dict[str, Row] = {}
            for precision in PRECISIONS:
                rows |= _rows(precision, prompt, true, peers, model=model, tokens=tokens, repeats=repeats, say=say)
        metrics.update(_ratios(rows, length))
        return rows

    return keep_by_length(
        out, "next-tokens", {"bloom": config}, lengths=lengths, measure=measure, summary=lambda _: metrics, say=say
    )


class _Ours:
    """Our model with the prompt in its cache."""

    def __init__(self, precision: str, model: Model, prompt: Tensor) -> None:
        self.model = model()
        if precision == "bfloat16":
            self.model.bfloat16()
        patch(self.model, linears="int8" if precision == "int8" else None)
        self.cache, self.last = ALiBiCache(), prompt[:, -1:]
        self.model(prompt, past_key_values=self.cache, logits_to_keep=1)
        self.logits()  # the first token may have to copy the prompt's keys

    def logits(self) -> Tensor:
        """The logits [V] of one more token, the prompt's last one again."""
        logits: Tensor = self.model(self.last, past_key_values=self.cache).logits[0, -1].float()
        self.cache.crop(-1)
        return logits

    def several(self, count: int) -> float:
        """Mean seconds of a step."""
        start = time.perf_counter()
        for _ in range(count):
            self.model(self.last, past_key_values=self.cache)
        seconds = time.perf_counter() - start
        self.cache.crop(-count)
        return seconds / count


def _rows(
    precision: str, prompt: Tensor, true: Tensor, peers: list[str], *, model: Model, tokens: int, repeats: int, say: Say
) -> dict[str, Row]:
    """The row of every program in this precision."""
    ours, listed = _Ours(precision, model, prompt), prompt[0].tolist()
    errors = {OURS: error(ours.logits(), true)}
    calls: dict[str, Callable[[], float]] = {OURS: lambda: ours.several(tokens)}
    original = model()
    with contextlib.ExitStack() as opened:
        for name in peers:
            if precision in NOT_IN.get(name, ()):
                continue
            room, threads = len(listed) + tokens + 1, torch.get_num_threads()
            opening = programs.opened(name, original, room=room, threads=threads, precision=precision)
            try:
                program = opened.enter_context(opening)
            except Crash as crash:
                say(f"{name} in {precision} is left out: {crash}")
                continue
            errors[name] = error(torch.from_numpy(program.logits([*listed, listed[-1]])), true)
            if errors[name] < PRECISIONS[precision]:
                calls[name] = program.several(listed, tokens)
            else:
                say(f"{name} in {precision} is off by {errors[name]:.1e} at {len(listed)} tokens, so it is not timed")
        times = {name: 1e3 * s for name, s in medians_of(calls, repeats=repeats, seconds=math.inf).items()}
    return {
        f"{name}, {precision}": {"length": len(listed), "error": off, "forward_ms": times.get(name)}
        for name, off in errors.items()
    }


def _ratios(rows: Mapping[str, Row], length: int) -> dict[str, float]:
    """Our time over each program's, and over that of the fastest program, by precision."""
    times = {name: ms for name, row in rows.items() if isinstance(ms := row["forward_ms"], float)}
    ratios: dict[str, float] = {}
    for precision in PRECISIONS:
        others = {name: ms for name, ms in times.items() if name.endswith(f", {precision}")}
        ours = others.pop(f"{OURS}, {precision}")
        ratios |= {f"ours_over_{name}_{length}": ours / ms for name, ms in others.items()}
        if others:
            ratios[f"ours_over_best_{precision}_{length}"] = ours / min(others.values())
    return ratios
