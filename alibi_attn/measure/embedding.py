"""`alibi bench embedding`: a whole encoder on long texts and on a mixed batch, ours compared with what users would run instead.

12 layers × 768, 12 heads, random weights, fp32, forward, on the CPU. Hidden states are compared first. Each measurement then
runs in a fresh process, to measure its peak memory separately. Peers: `peers/dense_encoder.py` and `peers/bert.py`.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from alibi_attn import records
from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.measure.harness import Columns, Row, Rows, keep
from alibi_attn.measure.peers.bert import plain_bert
from alibi_attn.measure.peers.dense_encoder import DenseEncoder, Sizes
from alibi_attn.measure.timing import in_fresh_process, peak_raised_by, peak_rss_bytes, time_attention, too_large

LENGTHS = (512, 2048, 8192)
MIXED = (1024, 512, 384, 256, 256, 128, 64, 32)  # 2,656 tokens, 8,192 with padding
OURS, ORIGINAL, SDPA, BERT = "ours", "original: dense bias, eager", "SDPA + dense bias", "BERT, SDPA, no bias"
# By encoder: its short name in metrics, and how many arrays of B·H·T² numbers it holds at its peak.
ENCODERS = {OURS: ("ours", 0), ORIGINAL: ("original", 5), SDPA: ("sdpa_dense_bias", 3), BERT: ("bert_no_bias", 0)}
ATTENTION_LAYERS = ("ALiBiBertSelfAttention", "DenseSelfAttention", "BertSelfAttention")
CHECKED = ((512,), (400, 300, 90, 1))
MOST_ERROR = 1e-4  # of the largest hidden state, in fp32
COLUMNS = ("forward_ms", "attention_share", "peak_memory_bytes")  # attention_share excludes the linear layers
WARM_UP_LENGTH = 256  # long enough to take the same code path

Build = Callable[[Sizes], nn.Module]


def our_encoder(sizes: Sizes) -> nn.Module:
    """An `ALiBiBertModel` with random weights (seed 0), ready for inference."""
    torch.manual_seed(0)
    config = ALiBiBertConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=sizes.layers, pooler=False,
        num_attention_heads=sizes.heads, intermediate_size=sizes.inner, initializer_range=sizes.initializer_range,
    )  # fmt: skip
    return ALiBiBertModel(config).train(False)


def embedding(
    out: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    mixed: Sequence[int] = MIXED,
    layers: int = 12,
    sizes: Sizes | None = None,
    checked: Sequence[Sequence[int]] = CHECKED,
    repeats: int = 5,
    seconds: float = 15.0,
    build: Build = our_encoder,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measures single texts and a mixed batch, saves one record of each after every batch, and returns their paths.

    Args:
        lengths: lengths of single texts.
        mixed: lengths of the texts in one batch, which all encoders but ours pad to the longest.
        layers: number of layers of the encoder.
        sizes: sizes of the encoder; by default the base size with `layers` layers.
        checked: lengths of the batches whose hidden states are compared.
        repeats, seconds: maximum number of passes per encoder and batch, and the time after which no pass starts;
            the record has their median.

    Raises:
        FileExistsError: one of the records already exists; nothing is measured.
        RuntimeError: hidden states differ.
    """
    sizes = Sizes(layers=layers) if sizes is None else sizes
    shared: dict[str, records.Json] = {
        **dataclasses.asdict(sizes), "initializer_range": sizes.initializer_range, "dtype": "float32",
        "threads": torch.get_num_threads(), "ways": list(ENCODERS), "repeats": repeats, "seconds_at_most": seconds,
    }  # fmt: skip
    batches: dict[str, list[tuple[int, ...]]] = {
        "embedding/texts": [(length,) for length in sorted(lengths)],
        "embedding/mixed": [tuple(mixed)],
    }
    configs: dict[str, dict[str, records.Json]] = {
        "embedding/texts": {**shared, "lengths": sorted(lengths), "batch": 1},
        "embedding/mixed": {**shared, "lengths": list(mixed), "batch": len(mixed)},
    }
    errors: dict[str, float] = {}

    def steps() -> Iterator[Mapping[str, Rows]]:
        errors.update(in_fresh_process(_errors, build, sizes, checked))
        for name, error in errors.items():
            say(f"our hidden states and those of {name} differ by {error:.1e} of the largest")
            if not error < MOST_ERROR:
                raise RuntimeError(f"ours is off by {error:.1e} of the largest hidden state of {name}")
        for record, texts in batches.items():
            for batch in texts:
                yield {record: {name: _row(name, batch, build, sizes, repeats, seconds, say) for name in ENCODERS}}

    return keep(out, configs, steps(), summary=lambda columns: _summary(errors, columns))


def _row(
    name: str, batch: Sequence[int], build: Build, sizes: Sizes, repeats: int, seconds: float, say: Callable[[str], None]
) -> Row:  # fmt: skip
    """The row of one encoder on one batch; without a time if there is too little memory."""
    label = f"{name:>28} {' '.join(map(str, batch)):>6}"
    row: Row = {"length": max(batch), "tokens": sum(batch)}
    why_not = too_large(ENCODERS[name][1] * len(batch) * sizes.heads * max(batch) ** 2 * 4)
    if why_not is not None:
        say(f"{label}: skipped, {why_not}")
        return {**row, **dict.fromkeys(COLUMNS), "why_not": why_not}
    measured = in_fresh_process(_measure, name, batch, build, sizes, repeats, seconds)
    forward_ms, attention, peak = measured
    say(f"{label}: {forward_ms / 1e3:8.2f} s, {attention:4.0%} in attention, {peak / 2**30:6.2f} GiB")
    return {**row, **dict(zip(COLUMNS, measured, strict=True)), "why_not": None}


def _measure(
    name: str, batch: Sequence[int], build: Build, sizes: Sizes, repeats: int, seconds: float
) -> tuple[float, float, int]:
    """The COLUMNS of a forward pass. The peak memory includes building the model."""
    before = peak_rss_bytes()
    model, attention = _model(name, build, sizes, max(batch)), [0.0]
    time_attention(model, ATTENTION_LAYERS, attention)
    passes: list[tuple[float, float]] = []
    with torch.inference_mode():
        model(*_inputs([min(WARM_UP_LENGTH, max(batch))], sizes))
        ids, mask = _inputs(batch, sizes)
        end = time.perf_counter() + seconds
        while not passes or (len(passes) < repeats and time.perf_counter() < end):
            attention[0], start = 0.0, time.perf_counter()
            model(ids, mask)
            passes.append((time.perf_counter() - start, attention[0]))
    whole, part = (statistics.median(times) for times in zip(*passes, strict=True))
    return whole * 1e3, part / whole, peak_raised_by(before)


def _errors(build: Build, sizes: Sizes, checked: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest difference between ours and each dense peer with the same weights, over the largest hidden state."""
    errors: dict[str, float] = {}
    ours = build(sizes)
    for name in (ORIGINAL, SDPA):
        peer = DenseEncoder(sizes, max(map(max, checked)), eager=name == ORIGINAL).train(False)
        peer.take(ours.state_dict())
        for batch in checked:
            ids, mask = _inputs(batch, sizes)
            with torch.inference_mode():
                hidden, true = ours(ids, mask).last_hidden_state, peer(ids, mask)
            visible = mask.bool()
            error = float((hidden - true)[visible].abs().max() / true[visible].abs().max())
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _model(name: str, build: Build, sizes: Sizes, longest: int) -> nn.Module:
    torch.manual_seed(0)
    if name == OURS:
        return build(sizes)
    if name == BERT:
        return plain_bert(sizes, longest)
    return DenseEncoder(sizes, longest, eager=name == ORIGINAL).train(False)


def _inputs(batch: Sequence[int], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(token ids, mask) of random texts of these lengths, padded on the right."""
    shape = (len(batch), max(batch))
    ids = torch.randint(1, sizes.vocabulary, shape, generator=torch.Generator().manual_seed(sum(batch)))
    mask = (torch.arange(shape[1]) < torch.tensor(batch)[:, None]).long()
    return ids * mask, mask


def _summary(errors: Mapping[str, float], curves: Columns) -> dict[str, float | None]:
    """The errors, every encoder's time over ours, and the share of attention in ours, by length."""
    metrics: dict[str, float | None] = {f"error_against_{ENCODERS[name][0]}": error for name, error in errors.items()}
    ours = curves[OURS]
    for at, length in enumerate(ours["length"]):
        base, share = ours["forward_ms"][at], ours["attention_share"][at]
        metrics[f"attention_share_{length}"] = share if isinstance(share, float) else None
        for name, (short, _) in ENCODERS.items():
            time_ms = curves[name]["forward_ms"][at]
            if name != OURS and isinstance(time_ms, float) and isinstance(base, float):
                metrics[f"speedup_over_{short}_{length}"] = time_ms / base
    return metrics
