"""`alibi bench serving`: time and peak memory of BLOOM, MPT, Falcon-RW and T5's encoder from transformers, unmodified and
patched.

Two layers of width 1024, one sequence, one forward pass, in fp32 and, for the patched model, also in bf16. Each measurement runs
in a fresh process, to measure its peak memory separately. BLOOM also runs in llama.cpp and CTranslate2 if they are installed
(`peers/programs.py`).
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.t5.modeling_t5 import T5EncoderModel

from alibi_attn.hf import patch
from alibi_lab import records
from alibi_lab.measure import timing
from alibi_lab.measure.harness import Config, Row, Say, number, report
from alibi_lab.measure.peers import programs
from alibi_lab.measure.peers import transformers_decoders as decoders
from alibi_lab.measure.peers.transformers_decoders import FAMILIES, VOCABULARY, bloom, decoder
from alibi_lab.measure.timing import in_fresh_process

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONGEST_UNPATCHED = 8192  # needs 18 GB there (skipped if less is available) and four times that at 16,384
OURS, BF16, ORIGINAL = "ours", "ours, bf16", "transformers"  # the curves of a record: patched, and original
CHECKED_LENGTH = 512
# The metric with the error of patched logits, and the numerics of `patch` that it is for.
Numerics = Literal["exact", "checkpoint"]
NUMERICS: Mapping[str, Numerics] = {"logits_error_checkpoint": "checkpoint", "logits_error": "exact"}
MOST_ERROR = 1e-3  # of the largest logit, of another program with the same weights; llama.cpp's GELU is off by 1e-5
WARM_UP_LENGTH = 768  # long enough to take the same code path
COLUMNS = ("length", "forward_ms", "attention_seconds", "peak_memory_bytes")
TURNS, LONG_SECONDS = 3, 2.0  # the fastest pass counts; a pass longer than LONG_SECONDS is the last

Rows = dict[int, Row]  # by length


def serving(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    unpatched_lengths: Sequence[int] | None = None,
    families: Sequence[str] = FAMILIES,
    width: int = 1024,
    say: Say = print,
) -> list[Path]:
    """Measures every family at every length, patched and original; saves one record per family and returns their paths.

    Args:
        lengths: sequence lengths, as in 1024,8192; default 512 … 16384.
        unpatched_lengths: lengths for the originals and other programs; default the `lengths` up to LONGEST_UNPATCHED.
        families: model families: bloom, mpt, falcon, t5; default all.

    Raises:
        ValueError: an unknown family.
        FileExistsError: a family's record already exists; it is found before measuring if no length was skipped in it.
    """
    unpatched = [n for n in lengths if n <= LONGEST_UNPATCHED] if unpatched_lengths is None else unpatched_lengths
    return [_family(out, family, sorted(lengths), sorted(unpatched), width, say) for family in families]


def _family(out: Path, family: str, lengths: list[int], unpatched: list[int], width: int, say: Say) -> Path:
    started = datetime.datetime.now(datetime.UTC)
    peers, skipped = programs.installed(say) if family == "bloom" else [], list[records.Json]()
    config: Config = {
        "family": family,
        "layers": decoders.LAYERS,
        "width": width,
        "heads": decoders.HEADS,
        "vocabulary": VOCABULARY,
        "batch": 1,
        "dtype": "float32",
        "peers": list(peers),
        "lengths": [*lengths],
        "unpatched_lengths": [*unpatched],
        "threads": None,  # torch's default
        "skipped": skipped,
    }
    record_name = f"serving/{family}"
    records.expect_new(out, "benchmark", record_name, config)
    errors = in_fresh_process(_logits_errors, family, width)
    report(record_name, {f"errors at {CHECKED_LENGTH} tokens": errors}, say)
    curves = {OURS: lengths, BF16: lengths, ORIGINAL: unpatched, **dict.fromkeys(peers, unpatched)}
    measured: dict[str, Rows] = {name: {} for name in curves}
    for length in sorted({*lengths, *unpatched}):
        for name in [name for name, at in curves.items() if length in at]:
            why_not = _too_large(measured[name], length)
            if why_not is None and name in peers:
                row, off = in_fresh_process(_measure_program, name, length, width)
                errors[f"logits_error_{name}_{length}"] = off
                if not off < MOST_ERROR:
                    why_not = f"its logits are off by {off:.1e}, so its time is not comparable"
            elif why_not is None:
                row = in_fresh_process(_measure, family, name, length, width)
            if why_not is None:
                measured[name][length] = {"length": length, **row}
                report(record_name, {name: measured[name][length]}, say)
            else:
                skipped.append(f"{name} {length}")
                say(f"{record_name} {name} {length}: skipped, {why_not}")
    metrics = {**errors, **_speedups(measured)}
    columns = {
        name: {column: [row[column] for row in rows.values()] for column in COLUMNS} for name, rows in measured.items()
    }
    record = records.make("benchmark", record_name, config=config, metrics=metrics, curves=columns, started=started)
    return records.save(record, out)


def _measure(family: str, name: str, length: int, width: int) -> Row:
    model, attention = decoder(family, width, max(length, WARM_UP_LENGTH)), [0.0]
    if name == BF16:
        model.bfloat16()
    if name != ORIGINAL:
        patch(model)
    timing.time_attention(model, decoders.ATTENTION_LAYERS, attention)
    with torch.inference_mode():
        _outputs(model, _tokens(WARM_UP_LENGTH), logits_to_keep=1)
        before, passes = timing.peak_rss_bytes(), []
        attention[0] = 0.0
        for total in _passes(lambda: _outputs(model, _tokens(length), logits_to_keep=1)):
            passes.append((total, attention[0]))
            attention[0] = 0.0
    return _row(*min(passes), before)


def _measure_program(name: str, length: int, width: int) -> tuple[Row, float]:
    """(row of another program, error of its last logits relative to a patched model's largest logit)."""
    model, tokens, room = bloom(width), _tokens(length), max(length, WARM_UP_LENGTH)
    with programs.opened(name, model, room=room, threads=torch.get_num_threads()) as program:
        program.logits(_tokens(WARM_UP_LENGTH)[0].tolist())
        outputs, before = [], timing.peak_rss_bytes()
        fastest = min(_passes(lambda: outputs.append(program.logits(tokens[0].tolist()))))
    row = _row(fastest, None, before)
    patch(model)
    with torch.inference_mode():
        expected = model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
    return row, error(torch.from_numpy(outputs[-1]), expected)


def _passes(call: Callable[[], object]) -> Iterator[float]:
    """Yields the seconds of up to TURNS calls and stops after a call longer than LONG_SECONDS."""
    for _ in range(TURNS):
        total = timing.elapsed_ms(call) / 1e3
        yield total
        if total > LONG_SECONDS:
            break


def _logits_errors(family: str, width: int) -> dict[str, float]:
    """The errors of the patched model: as it is measured, with the checkpoint's rounding, and in bf16, by metric."""
    errors, tokens = dict[str, float](), _tokens(CHECKED_LENGTH)
    with torch.no_grad():
        for name, numerics in NUMERICS.items():
            if family == "t5" and numerics == "checkpoint":
                continue  # it has no rounding of its own to reproduce
            model = decoder(family, width, CHECKED_LENGTH)
            original = _outputs(model, tokens)
            patch(model, numerics=numerics)
            ours = _outputs(model, tokens)
            errors[name] = error(ours, original)
        # The last model is the exact one.
        errors["logits_error_bf16"] = error(_outputs(model.bfloat16(), tokens).float(), ours)
    return errors


def _outputs(model: PreTrainedModel, tokens: Tensor, **options: int) -> Tensor:
    """The logits, or the hidden states of an encoder."""
    options = {} if isinstance(model, T5EncoderModel) else {"use_cache": False, **options}
    output: Tensor = model(tokens, **options)[0]
    return output


def error(logits: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def _tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def _row(seconds: float, attention_seconds: float | None, before: int) -> Row:
    """The row of a forward pass: its time, the time in attention without linear layers, and the added peak memory."""
    peak = timing.peak_raised_by(before)
    return {"forward_ms": seconds * 1e3, "attention_seconds": attention_seconds, "peak_memory_bytes": peak}


def _speedups(measured: Mapping[str, Rows]) -> dict[str, float | None]:
    """The ratio of every peer's time to ours in fp32, at every length that both have."""
    ratios: dict[str, float | None] = {}
    for name, rows in measured.items():
        for length in sorted(rows.keys() & measured[OURS].keys()) if name not in (OURS, BF16) else ():
            metric = "speedup" if name == ORIGINAL else f"speedup_{name}"
            for column, ratio in (("forward_ms", metric), ("attention_seconds", "attention_speedup")):
                ours, theirs = measured[OURS][length][column], rows[length][column]
                if ours is not None and theirs is not None:
                    ratios[f"{ratio}_{length}"] = number(theirs) / number(ours)
    return ratios


def _too_large(rows: Rows, length: int) -> str | None:
    """Why this length is skipped, or None. Memory is extrapolated with the square of the length, which is an upper bound."""
    if not rows:
        return None
    shorter = max(rows)
    return timing.too_large(number(rows[shorter]["peak_memory_bytes"]) * (length / shorter) ** 2)
