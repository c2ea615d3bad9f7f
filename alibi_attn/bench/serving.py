"""`alibi bench serving`: BLOOM, MPT and Falcon-RW of transformers at long length, as they come and patched.

Two layers of width 1024, fp32, one sequence, one forward pass. Each measurement is a process of its own, so that its peak
memory is its own. The patch comes in as an argument: it lives beside this folder, in `alibi_attn.hf`.
"""

import concurrent.futures.process
import dataclasses
import datetime
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

from alibi_attn import records

Result = TypeVar("Result")
Patcher: TypeAlias = Callable[..., object]

LENGTHS = (1024, 2048, 4096, 8192, 16384)
UNPATCHED_LENGTHS = (1024, 2048, 4096, 8192)  # 18 GB at 8,192; four times that at 16,384
FAMILIES = ("bloom", "mpt", "falcon")
HEADS, LAYERS, VOCABULARY = 16, 2, 1000
CHECKED_LENGTH = 512
WARM_UP_LENGTH = 768  # long enough to take the same path


@dataclasses.dataclass(frozen=True)
class Measured:
    """One forward pass: seconds in all, and in attention without its linear maps; how much it raised the peak memory."""

    seconds: float
    attention_seconds: float
    peak_memory_bytes: int


def serving(
    out: Path,
    *,
    patch: Patcher,
    lengths: Sequence[int] = LENGTHS,
    unpatched_lengths: Sequence[int] = UNPATCHED_LENGTHS,
    families: Sequence[str] = FAMILIES,
    width: int = 1024,
    threads: int | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measure every family at every length, patched and unpatched; one record a family, returns their paths.

    Args:
        patch: `alibi_attn.hf.patch`, also with arguments as a functools.partial.
        threads: of torch; default what torch takes.
    """
    paths = []
    for family in families:
        started = datetime.datetime.now(datetime.UTC)
        errors = _in_fresh_process(_logits_errors, family, patch, width, threads)
        say(
            f"{family}: patched logits at {CHECKED_LENGTH} tokens differ by {errors['logits_error']:.1e} of the largest, "
            f"with the checkpoint's rounding by {errors['logits_error_checkpoint']:.1e}"
        )
        found: dict[tuple[str, int], Measured] = {}
        for length in sorted({*lengths, *unpatched_lengths}):
            for way, patcher, wanted in (("patched", patch, lengths), ("unpatched", None, unpatched_lengths)):
                if length in wanted:
                    found[way, length] = measured = _in_fresh_process(_measure, family, length, patcher, width, threads)
                    say(
                        f"{family:>6} {way:>9} {length:>6}: {measured.seconds:8.2f} s, attention "
                        f"{measured.attention_seconds:8.2f} s, {measured.peak_memory_bytes / 2**30:6.2f} GiB"
                    )
        config: dict[str, records.Json] = {
            "family": family, "layers": LAYERS, "width": width, "heads": HEADS, "vocabulary": VOCABULARY, "batch": 1,
            "dtype": "float32", "lengths": sorted(lengths), "unpatched_lengths": sorted(unpatched_lengths),
            "threads": threads,
        }  # fmt: skip
        record = records.make(
            "benchmark",
            f"serving/{family}",
            config=config,
            metrics={**errors, **_speedups(found)},
            curves={way: _columns(found, way) for way in ("patched", "unpatched")},
            started=started,
        )
        paths.append(records.save(record, out))
    return paths


def _measure(family: str, length: int, patch: Patcher | None, width: int, threads: int | None) -> Measured:
    model, seconds = _model(family, max(length, WARM_UP_LENGTH), width, threads), [0.0]
    if patch is not None:
        patch(model)
    _time_attention(model, seconds)
    with torch.inference_mode():
        model(_tokens(WARM_UP_LENGTH), use_cache=False, logits_to_keep=1)
        before, seconds[0] = _peak_bytes(), 0.0
        start = time.perf_counter()
        model(_tokens(length), use_cache=False, logits_to_keep=1)
        total = time.perf_counter() - start
    return Measured(total, seconds[0], _peak_bytes() - before)


def _logits_errors(family: str, patch: Patcher, width: int, threads: int | None) -> dict[str, float]:
    """Largest difference over largest logit: patched as it is measured, and with the checkpoint's rounding."""
    tokens, errors = _tokens(CHECKED_LENGTH), {}
    for name, options in (("logits_error", {}), ("logits_error_checkpoint", {"numerics": "checkpoint"})):
        model = _model(family, CHECKED_LENGTH, width, threads)
        with torch.inference_mode():
            expected = model(tokens, use_cache=False).logits
            patch(model, **options)
            actual = model(tokens, use_cache=False).logits
        errors[name] = float((actual - expected).abs().max() / expected.abs().max())
    return errors


def _model(family: str, length: int, width: int, threads: int | None) -> PreTrainedModel:
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    model: PreTrainedModel
    if family == "bloom":
        model = BloomForCausalLM(BloomConfig(hidden_size=width, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY))
    elif family == "mpt":
        model = MptForCausalLM(
            MptConfig(d_model=width, n_layers=LAYERS, n_heads=HEADS, vocab_size=VOCABULARY, max_seq_len=length)
        )
    elif family == "falcon":
        config = FalconConfig(
            hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=VOCABULARY, alibi=True,
            multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True,
        )  # fmt: skip
        model = FalconForCausalLM(config)
    else:
        raise ValueError(f"family is {family!r} but must be one of {', '.join(FAMILIES)}")
    model.requires_grad_(False)
    return model.train(False)


def _time_attention(model: nn.Module, seconds: list[float]) -> None:
    """Add the time that the attention layers take to `seconds[0]`, and take away that of their linear maps."""

    def time_into(module: nn.Module, sign: float) -> None:
        started = [0.0]

        def start(*_: object) -> None:
            started[0] = time.perf_counter()

        def stop(*_: object) -> None:
            seconds[0] += sign * (time.perf_counter() - started[0])

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)

    for layer in model.modules():
        if type(layer).__name__ in ("BloomAttention", "MptAttention", "FalconAttention"):
            time_into(layer, 1.0)
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    time_into(part, -1.0)


def _tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def _speedups(found: dict[tuple[str, int], Measured]) -> dict[str, float | None]:
    """unpatched / patched at every length that has both."""
    ratios: dict[str, float | None] = {}
    for way, length in found:
        if way == "patched" and ("unpatched", length) in found:
            ours, theirs = found["patched", length], found["unpatched", length]
            ratios[f"speedup_{length}"] = theirs.seconds / ours.seconds
            ratios[f"attention_speedup_{length}"] = theirs.attention_seconds / ours.attention_seconds
    return ratios


def _columns(found: dict[tuple[str, int], Measured], way: str) -> dict[str, list[records.Json]]:
    lengths = sorted(length for name, length in found if name == way)
    fields = [field.name for field in dataclasses.fields(Measured)]
    columns = {name: [getattr(found[way, length], name) for length in lengths] for name in fields}
    return {"length": list(lengths), **columns}


def _in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except concurrent.futures.process.BrokenProcessPool:
            raise RuntimeError(
                f"{function.__name__}{arguments} died, most likely for lack of memory; pass shorter lengths"
            ) from None


def _peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux: getrusage, in bytes on a Mac
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
