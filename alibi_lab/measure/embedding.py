"""`alibi bench embedding`: a base-size encoder: ours, the original's arithmetic, SDPA, ONNX Runtime, llama.cpp, and a BERT
without a bias.

12 layers × 768, 12 heads, random weights, forward, on the CPU, in fp32, bf16 and int8. Hidden states are compared with ours in
fp32 first. Each measurement then runs in a fresh process, to measure its peak memory separately; the encoders take turns, several
rounds of them. They are in `embedding_peers.py`.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from alibi_lab import records
from alibi_lab.measure.embedding_peers import ENCODERS, OURS, Build, Place, inputs, our_encoder, plain, why_not
from alibi_lab.measure.harness import Columns, Row, Rows, Say, keep
from alibi_lab.measure.peers import installed
from alibi_lab.measure.peers.dense_encoder import Sizes
from alibi_lab.measure.timing import in_fresh_process, peak_raised_by, peak_rss_bytes, time_attention, too_large

LENGTHS = (512, 2048, 8192)
MIXED = (1024, 512, 384, 256, 256, 128, 64, 32)  # 2,656 tokens, 8,192 with padding
PRECISIONS = ("float32", "bfloat16", "int8")
ATTENTION_LAYERS = ("ALiBiBertSelfAttention", "DenseSelfAttention", "BertSelfAttention")
CHECKED = ((512,), (400, 300, 90, 1))
COLUMNS = ("forward_ms", "attention_share", "peak_memory_bytes")  # attention_share excludes the linear layers
MOST_ERROR = 1e-4  # in fp32, as a share of the norm of the hidden states
UNRELATED = 2**0.5  # the error of unrelated hidden states, which a norm has scaled
WARM_UP_LENGTH = 256  # long enough to take the same code path


def embedding(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    mixed: Sequence[int] = MIXED,
    precisions: Sequence[str] = PRECISIONS,
    layers: int = 12,
    sizes: Sizes | None = None,
    checked: Sequence[Sequence[int]] = CHECKED,
    rounds: int = 3,
    repeats: int = 3,
    seconds: float = 10.0,
    build: Build = our_encoder,
    say: Say = print,
) -> list[Path]:
    """Measures single texts and a mixed batch, saves one record of each per precision, and returns their paths.

    Args:
        lengths: lengths of single texts; default 512,2048,8192.
        mixed: lengths of the texts in one mixed batch, which most peers pad to the longest; default 1024 … 32.
        precisions: some of float32, bfloat16 and int8; default all.
        layers: number of layers.
        sizes: sizes of the encoder; by default the base size with `layers` layers.
        checked: lengths of the batches whose hidden states are compared.
        rounds: processes per encoder and batch, in turns with those of the other encoders.
        repeats: most passes per process; the median of all counts.
        seconds: time limit in seconds per process, after which no pass starts. An encoder is left out of a round while its passes
            have taken more than this per round.

    Raises:
        ValueError: an unknown precision, or int8 on a processor that does not support it.
        FileExistsError: one of the records already exists; nothing is measured.
        RuntimeError: hidden states differ.
    """
    sizes = Sizes(layers=layers) if sizes is None else sizes
    names = _names(precisions, say)
    shared: dict[str, records.Json] = {
        **dataclasses.asdict(sizes),
        "initializer_range": sizes.initializer_range,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "repeats": repeats,
        "seconds_at_most": seconds,
    }
    batches: dict[str, list[tuple[int, ...]]] = {"embedding/texts": [(length,) for length in sorted(lengths)]}
    batches["embedding/mixed"] = [tuple(mixed)]
    named = {precision: [name for name in names if ENCODERS[name].precision == precision] for precision in precisions}
    configs: dict[str, dict[str, records.Json]] = {
        f"{record}/{precision}": {
            **shared,
            "precision": precision,
            "peers": [plain(name) for name in named[precision]],
            "lengths": [length for batch in texts for length in batch],
            "batch": max(map(len, texts), default=1),
        }
        for record, texts in batches.items()
        for precision in precisions
    }

    def steps() -> Iterator[Mapping[str, Rows]]:
        with tempfile.TemporaryDirectory(prefix="alibi-attn-") as folder:
            place = Place(Path(folder), build, sizes, torch.get_num_threads(), rounds, repeats, seconds)
            errors = _checked(names, place, checked, say)
            for record, texts in batches.items():
                for batch in texts:
                    rows = _rows(names, batch, place, errors)
                    yield {
                        f"{record}/{precision}": {plain(name): rows[name] for name in named[precision]}
                        for precision in precisions
                    }

    return keep(out, configs, steps(), summary=summary, say=say)


def _names(precisions: Sequence[str], say: Say) -> list[str]:
    """The encoders in these precisions whose packages are installed; reports the others."""
    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown or not precisions:
        raise ValueError(f"precisions is {','.join(precisions)!r} but must be some of {', '.join(PRECISIONS)}")
    wanted = [name for name, encoder in ENCODERS.items() if encoder.precision in precisions]
    return installed({name: why_not(name) for name in wanted}, say)


def _checked(names: Sequence[str], place: Place, checked: Sequence[Sequence[int]], say: Say) -> dict[str, float]:
    """The error of every encoder that computes ALiBi. Writes the models of other programs on the way."""
    errors: dict[str, float] = {}
    true = in_fresh_process(_hidden_states, OURS, place, checked)
    for name in names:
        encoder = ENCODERS[name]
        if encoder.write is not None:
            in_fresh_process(encoder.write, place, encoder.precision)
        if name == OURS or not encoder.biased:
            continue
        found = in_fresh_process(_hidden_states, name, place, checked)
        error = max(float((x - y).norm() / y.norm()) for x, y in zip(found, true, strict=True))
        say(f"hidden states of {name} and of ours in fp32 differ by {error:.1e} of their norm")
        errors[name] = error
        allowed = _allowed(name, errors)
        if not error < allowed:
            raise RuntimeError(
                f"{name} is off by {error:.1e} of the norm of our hidden states in fp32, more than {allowed:.1e}"
            )
    return errors


def _allowed(name: str, errors: Mapping[str, float]) -> float:
    """The largest error of an encoder. Random layers amplify rounding, so it is twice ours in the same precision."""
    encoder = ENCODERS[name]
    if encoder.precision == "float32":
        return max(encoder.error, MOST_ERROR)
    return UNRELATED / 2 if name.startswith(OURS) else 2 * errors[f"{OURS}, {encoder.precision}"]


def _hidden_states(name: str, place: Place, batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The hidden states of all tokens of these batches, in fp32 and without padding."""
    with torch.inference_mode():
        encoder = ENCODERS[name].open(place, ENCODERS[name].precision, batches, checked=True)
        given = [inputs(batch, place.sizes) for batch in batches]
        return [encoder(ids, mask).float()[mask.bool()].clone() for ids, mask in given]


def _rows(names: Sequence[str], batch: Sequence[int], place: Place, errors: Mapping[str, float]) -> dict[str, Row]:
    """The row of every encoder on one batch; without a time if there is too little memory."""
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    peaks, reasons = dict.fromkeys(names, 0), dict.fromkeys(names, "")
    for number in range(place.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if reasons[name] or sum(whole for whole, _ in passes[name]) > number * place.seconds:
                continue
            numbers = ENCODERS[name].arrays * len(batch) * place.sizes.heads * max(batch) ** 2
            reasons[name] = too_large(4 * numbers) or ""
            if not reasons[name]:
                found, peak = in_fresh_process(_measure, name, batch, place)
                passes[name], peaks[name] = passes[name] + found, max(peaks[name], peak)
    rows = {name: _row(batch, passes[name], peaks[name], reasons[name]) for name in names}
    return {name: {**row, "error": errors.get(name)} for name, row in rows.items()}


def _row(batch: Sequence[int], passes: list[tuple[float, float]], peak: int, why_not: str) -> Row:
    row: Row = {"length": max(batch), "tokens": sum(batch)}
    if not passes:
        return {**row, **dict.fromkeys(COLUMNS), "why_not": why_not}
    whole, part = (statistics.median(times) for times in zip(*passes, strict=True))
    share = part / whole if part else None
    return {**row, **dict(zip(COLUMNS, (whole * 1e3, share, peak), strict=True)), "why_not": None}


def _measure(name: str, batch: Sequence[int], place: Place) -> tuple[list[tuple[float, float]], int]:
    """Seconds of each pass, and of these in attention; and the peak memory, which includes building the model."""
    before = peak_rss_bytes()
    attention: list[float] = [0.0]
    passes: list[tuple[float, float]] = []
    with torch.inference_mode():
        encoder = ENCODERS[name].open(place, ENCODERS[name].precision, [batch], checked=False)
        if isinstance(encoder, torch.nn.Module):
            time_attention(encoder, ATTENTION_LAYERS, attention)
        encoder(*inputs([min(WARM_UP_LENGTH, max(batch))], place.sizes))
        ids, mask = inputs(batch, place.sizes)
        end = time.perf_counter() + place.seconds
        while not passes or (len(passes) < place.repeats and time.perf_counter() < end):
            attention[0], start = 0.0, time.perf_counter()
            encoder(ids, mask)
            passes.append((time.perf_counter() - start, attention[0]))
    return passes, peak_raised_by(before)


def summary(curves: Columns) -> dict[str, float | None]:
    """The errors, every encoder's time over ours, and the share of attention in ours, by length."""
    metrics: dict[str, float | None] = {}
    ours = curves[OURS]
    for name, columns in curves.items():
        short, error = ENCODERS[name].short, columns["error"][0]
        if isinstance(error, float):
            metrics[f"error_of_{short}"] = error
        for length, ms, base in zip(columns["length"], columns["forward_ms"], ours["forward_ms"], strict=True):
            if name != OURS and isinstance(ms, float) and isinstance(base, float):
                metrics[f"speedup_over_{short}_{length}"] = ms / base
    for length, share in zip(ours["length"], ours["attention_share"], strict=True):
        metrics[f"attention_share_{length}"] = share if isinstance(share, float) else None
    return metrics
