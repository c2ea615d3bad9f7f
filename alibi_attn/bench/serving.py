"""`alibi bench serving`: BLOOM, MPT and Falcon-RW of transformers at long length, as they come and patched; BLOOM also by others.

Two layers of width 1024, fp32 and patched in bf16 too, one sequence, one forward pass. Each measurement is a process of its own,
so that its peak memory is its own. The patch comes in as an argument: it lives beside this folder, in `alibi_attn.hf`.
llama.cpp and CTranslate2 are measured where they are installed (`model_peers.py`).
"""

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
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
from alibi_attn.bench import model_peers
from alibi_attn.bench.timing import available_bytes, in_fresh_process, peak_raised_by, peak_rss_bytes, time_attention

Patcher: TypeAlias = Callable[..., object]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
UNPATCHED_LENGTHS = (512, 1024, 2048, 4096, 8192)  # 18 GB at 8,192, less is skipped; four times that at 16,384
OURS, BF16, THEIRS = "ours", "ours, bf16", "transformers"  # the curves of a record: patched and as they come
FAMILIES = ("bloom", "mpt", "falcon")
ATTENTION_LAYERS = ("BloomAttention", "MptAttention", "FalconAttention")
HEADS, LAYERS, VOCABULARY = 16, 2, 1000
CHECKED_LENGTH = 512
MOST_ERROR = (
    1e-3  # of the largest logit, of somebody else's model with the same weights; llama.cpp's GELU is off by 1e-5
)
SPARE_BYTES = 2 << 30  # for the model, Python and everybody else
WARM_UP_LENGTH = 768  # long enough to take the same path
TURNS, LONG_SECONDS = 3, 2.0  # the fastest pass counts; a long one is not repeated


@dataclasses.dataclass(frozen=True)
class Measured:
    """One forward pass: time in all, and in attention without its linear maps; how much it raised the peak memory."""

    forward_ms: float
    attention_seconds: float | None  # of a model of transformers
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
        families: of `FAMILIES`.
        threads: of torch; default what torch takes.
    """
    paths = []
    for family in families:
        started = datetime.datetime.now(datetime.UTC)
        errors = in_fresh_process(_logits_errors, family, patch, width, threads)
        say(
            f"{family}: patched logits at {CHECKED_LENGTH} tokens differ by {errors['logits_error']:.1e} of the largest, with "
            f"the checkpoint's rounding by {errors['logits_error_checkpoint']:.1e}, in bf16 by {errors['logits_error_bf16']:.1e}"
        )
        peers = model_peers.installed(say) if family == "bloom" else []
        wanted = {OURS: lengths, BF16: lengths, THEIRS: unpatched_lengths, **dict.fromkeys(peers, unpatched_lengths)}
        found: dict[tuple[str, int], Measured] = {}
        skipped: list[records.Json] = []
        for length in sorted({*lengths, *unpatched_lengths}):
            for way in [way for way, at in wanted.items() if length in at]:
                if reason := _too_large(found, way, length):
                    skipped.append(f"{way} {length}")
                    say(f"{family:>6} {way:>12} {length:>6}: skipped, {reason}")
                    continue
                if way in peers:
                    measured, error = in_fresh_process(_measure_peer, way, length, patch, width, threads)
                    errors[f"logits_error_{way}_{length}"] = error
                    if not error < MOST_ERROR:
                        skipped.append(f"{way} {length}")
                        say(
                            f"{family:>6} {way:>12} {length:>6}: its logits are off by {error:.1e}, so its time says nothing"
                        )
                        continue
                else:
                    patcher = None if way == THEIRS else patch
                    measured = in_fresh_process(_measure, family, length, patcher, width, threads, way == BF16)
                found[way, length] = measured
                of_attention = measured.attention_seconds
                said = "" if of_attention is None else f"attention {of_attention:8.2f} s, "
                say(
                    f"{family:>6} {way:>12} {length:>6}: {measured.forward_ms / 1e3:8.2f} s, {said}"
                    f"{measured.peak_memory_bytes / 2**30:6.2f} GiB"
                )
        config: dict[str, records.Json] = {
            "family": family, "layers": LAYERS, "width": width, "heads": HEADS, "vocabulary": VOCABULARY, "batch": 1,
            "dtype": "float32", "peers": list(peers), "lengths": sorted(lengths), "unpatched_lengths": sorted(unpatched_lengths),
            "threads": threads, "skipped": skipped,
        }  # fmt: skip
        record = records.make(
            "benchmark",
            f"serving/{family}",
            config=config,
            metrics={**errors, **_speedups(found)},
            curves={way: _columns(found, way) for way in wanted},
            started=started,
        )
        paths.append(records.save(record, out))
    return paths


def _measure(
    family: str, length: int, patch: Patcher | None, width: int, threads: int | None, in_bf16: bool
) -> Measured:
    model, seconds = _model(family, max(length, WARM_UP_LENGTH), width, threads), [0.0]
    if in_bf16:
        model.bfloat16()
    if patch is not None:
        patch(model)
    time_attention(model, ATTENTION_LAYERS, seconds)
    with torch.inference_mode():
        model(_tokens(WARM_UP_LENGTH), use_cache=False, logits_to_keep=1)
        before, fastest = peak_rss_bytes(), Measured(math.inf, 0.0, 0)
        for _ in range(TURNS):
            seconds[0], start = 0.0, time.perf_counter()
            model(_tokens(length), use_cache=False, logits_to_keep=1)
            total = time.perf_counter() - start
            if total * 1e3 < fastest.forward_ms:
                fastest = Measured(total * 1e3, seconds[0], 0)
            if total > LONG_SECONDS:
                break
    return dataclasses.replace(fastest, peak_memory_bytes=peak_raised_by(before))


def _measure_peer(name: str, length: int, patch: Patcher, width: int, threads: int | None) -> tuple[Measured, float]:
    """Somebody else's pass, and how far its last logits are off those of a patched model, over the largest."""
    model, tokens = _bloom(WARM_UP_LENGTH, width, threads), _tokens(length)
    room = max(length, WARM_UP_LENGTH)
    with model_peers.opened(name, model, room=room, threads=torch.get_num_threads()) as peer:
        peer.logits(_tokens(WARM_UP_LENGTH)[0].tolist())
        listed, before, fastest = tokens[0].tolist(), peak_rss_bytes(), math.inf
        for _ in range(TURNS):
            start = time.perf_counter()
            found = peer.logits(listed)
            total = time.perf_counter() - start
            fastest = min(fastest, total)
            if total > LONG_SECONDS:
                break
    measured = Measured(fastest * 1e3, None, peak_raised_by(before))
    patch(model)
    with torch.inference_mode():
        expected = model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
    return measured, float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max())


def _bloom(length: int, width: int, threads: int | None) -> BloomForCausalLM:
    model = _model("bloom", length, width, threads)
    assert isinstance(model, BloomForCausalLM)
    return model


def _logits_errors(family: str, patch: Patcher, width: int, threads: int | None) -> dict[str, float]:
    """Largest difference over largest logit: patched as it is measured, with the checkpoint's rounding, and in bf16."""
    tokens, errors = _tokens(CHECKED_LENGTH), {}
    for name, options in (("logits_error", {}), ("logits_error_checkpoint", {"numerics": "checkpoint"})):
        model = _model(family, CHECKED_LENGTH, width, threads)
        with torch.inference_mode():
            expected = model(tokens, use_cache=False).logits
            patch(model, **options)
            actual = model(tokens, use_cache=False).logits
        errors[name] = float((actual - expected).abs().max() / expected.abs().max())
    model = _model(family, CHECKED_LENGTH, width, threads)
    patch(model)
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        actual = model.bfloat16()(tokens, use_cache=False).logits.float()
    errors["logits_error_bf16"] = float((actual - expected).abs().max() / expected.abs().max())
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


def _tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def _speedups(found: dict[tuple[str, int], Measured]) -> dict[str, float | None]:
    """Theirs over ours in fp32, at every length that has both."""
    ratios: dict[str, float | None] = {}
    for way, length in found:
        if way in (OURS, BF16) or (OURS, length) not in found:
            continue
        ours, theirs = found[OURS, length], found[way, length]
        name = "speedup" if way == THEIRS else f"speedup_{way}"
        ratios[f"{name}_{length}"] = theirs.forward_ms / ours.forward_ms
        if ours.attention_seconds is not None and theirs.attention_seconds is not None:
            ratios[f"attention_speedup_{length}"] = theirs.attention_seconds / ours.attention_seconds
    return ratios


def _too_large(found: dict[tuple[str, int], Measured], way: str, length: int) -> str | None:
    """Why this would end with a killed process: memory grows with the square of the length at most."""
    shorter = max((known for name, known in found if name == way), default=None)
    available = available_bytes()
    if shorter is None or available is None:
        return None
    needed = found[way, shorter].peak_memory_bytes * (length / shorter) ** 2
    if needed < available - SPARE_BYTES:
        return None
    return f"it may need {needed / 2**30:.0f} GiB and {available / 2**30:.0f} are free"


def _columns(found: dict[tuple[str, int], Measured], way: str) -> dict[str, list[records.Json]]:
    lengths = sorted(length for name, length in found if name == way)
    fields = [field.name for field in dataclasses.fields(Measured)]
    columns = {name: [getattr(found[way, length], name) for length in lengths] for name in fields}
    return {"length": list(lengths), **columns}
