"""`alibi bench embedding`: a whole encoder on long texts and on a batch of mixed lengths, ours and what users would run instead.

12 layers × 768, 12 heads, random weights, fp32, forward, on the CPU. Hidden states are compared first; then each measurement is a
process of its own, so that its peak memory is its own. Our model comes in as an argument: it lives beside this folder, in
`alibi_attn.hf`. Peers: `encoder_peers.py`.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from alibi_attn import records
from alibi_attn.bench.columns import Columns, GrowingRecord, append
from alibi_attn.bench.encoder_peers import DenseEncoder, Sizes, plain_bert
from alibi_attn.bench.timing import available_bytes, in_fresh_process, peak_raised_by, peak_rss_bytes, time_attention

LENGTHS = (512, 2048, 8192)
MIXED = (1024, 512, 384, 256, 256, 128, 64, 32)  # 2,656 tokens, 8,192 with padding
OURS, ORIGINAL, SDPA, BERT = "ours", "original: dense bias, eager", "SDPA + dense bias", "BERT, SDPA, no bias"
# Each way, its short name in metrics, and how many arrays of B·H·T² numbers it has at its height.
WAYS = {OURS: ("ours", 0), ORIGINAL: ("original", 5), SDPA: ("sdpa_dense_bias", 3), BERT: ("bert_no_bias", 0)}
ATTENTION_LAYERS = ("ALiBiBertSelfAttention", "DenseSelfAttention", "BertSelfAttention")
CHECKED = ((512,), (400, 300, 90, 1))
MOST_ERROR = 1e-4  # of the largest hidden state, in fp32
WARM_UP_LENGTH = 256  # long enough to take the same path
SPARE_BYTES = 2 << 30  # for the weights, Python and everybody else

Build = Callable[[Sizes], nn.Module]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A forward pass: its time, the share of attention without its linear maps, and the peak memory of building and passing."""

    forward_ms: float
    attention_share: float
    peak_memory_bytes: int


def embedding(
    out: Path,
    *,
    config_class: Callable[..., object],
    model_class: Callable[..., nn.Module],
    lengths: Sequence[int] = LENGTHS,
    mixed: Sequence[int] = MIXED,
    sizes: Sizes = Sizes(),  # noqa: B008  (frozen)
    checked: Sequence[Sequence[int]] = CHECKED,
    repeats: int = 5,
    budget_s: float = 15.0,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Measure and keep two records, of single texts and of a mixed batch, renewed after every length; returns their paths.

    Args:
        config_class, model_class: `ALiBiBertConfig` and `ALiBiBertModel`.
        lengths: of single texts.
        mixed: lengths of the texts of one batch, which all but ours pad to the longest.
        checked: lengths of the batches whose hidden states are compared.
        repeats, budget_s: passes at most, and seconds after which no more is begun, for each way and length; the median counts.

    Raises:
        FileExistsError: before anything is measured, if one of the records is there already.
        RuntimeError: hidden states that differ.
    """
    build = functools.partial(_ours, config_class, model_class)
    asked: dict[str, records.Json] = {
        **dataclasses.asdict(sizes), "initializer_range": sizes.initializer_range, "dtype": "float32",
        "threads": torch.get_num_threads(), "ways": list(WAYS), "repeats": repeats, "seconds_at_most": budget_s,
    }  # fmt: skip
    batches: dict[str, list[tuple[int, ...]]] = {
        "texts": [(length,) for length in sorted(lengths)],
        "mixed": [tuple(mixed)],
    }
    configs: dict[str, dict[str, records.Json]] = {
        "texts": {**asked, "lengths": sorted(lengths), "batch": 1},
        "mixed": {**asked, "lengths": list(mixed), "batch": len(mixed)},
    }
    for kind, config in configs.items():
        records.expect_new(out, "benchmark", f"embedding/{kind}", config)
    errors = in_fresh_process(_errors, build, sizes, checked)
    for name, error in errors.items():
        say(f"hidden states of ours and of {name} differ by {error:.1e} of the largest")
        if not error < MOST_ERROR:
            raise RuntimeError(f"ours is off by {error:.1e} of the largest hidden state of {name}")
    paths = []
    for kind, config in configs.items():
        record = GrowingRecord(out, f"embedding/{kind}", config, functools.partial(_summary, errors))
        for batch in batches[kind]:
            for way in WAYS:
                append(record.curves, way, _row(way, batch, build, sizes, repeats, budget_s, say))
            path = record.keep()
        paths.append(path)
    return paths


def _row(
    way: str,
    batch: Sequence[int],
    build: Build,
    sizes: Sizes,
    repeats: int,
    budget_s: float,
    say: Callable[[str], None],
) -> dict[str, records.Json]:
    """One way on one batch, as a row of its curve; without a time where memory does not suffice."""
    longest = max(batch)
    about = f"{way:>28} {' '.join(map(str, batch)):>6}"
    row: dict[str, records.Json] = {"length": longest, "tokens": sum(batch)}
    needed = WAYS[way][1] * len(batch) * sizes.heads * longest**2 * 4
    available = available_bytes()
    if available is not None and needed > available - SPARE_BYTES:
        why = f"it may need {needed / 2**30:.0f} GiB and {available / 2**30:.0f} are free"
        say(f"{about}: skipped, {why}")
        empty = dict.fromkeys(field.name for field in dataclasses.fields(Measured))
        return {**row, **empty, "why_not": why}
    found = in_fresh_process(_measure, way, batch, build, sizes, repeats, budget_s)
    say(
        f"{about}: {found.forward_ms / 1e3:8.2f} s, {found.attention_share:4.0%} in attention, "
        f"{found.peak_memory_bytes / 2**30:6.2f} GiB"
    )
    return {**row, **dataclasses.asdict(found), "why_not": None}


def _measure(way: str, batch: Sequence[int], build: Build, sizes: Sizes, repeats: int, budget_s: float) -> Measured:
    before = peak_rss_bytes()
    model, seconds = _model(way, build, sizes, max(batch)), [0.0]
    time_attention(model, ATTENTION_LAYERS, seconds)
    passes: list[tuple[float, float]] = []
    with torch.inference_mode():
        model(*_inputs([min(WARM_UP_LENGTH, max(batch))], sizes))
        ids, mask = _inputs(batch, sizes)
        end = time.perf_counter() + budget_s
        while not passes or (len(passes) < repeats and time.perf_counter() < end):
            seconds[0], start = 0.0, time.perf_counter()
            model(ids, mask)
            passes.append((time.perf_counter() - start, seconds[0]))
    whole, attention = (statistics.median(part) for part in zip(*passes, strict=True))
    return Measured(whole * 1e3, attention / whole, peak_raised_by(before))


def _errors(build: Build, sizes: Sizes, checked: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest difference of ours from each dense peer with the same weights, over the largest hidden state."""
    errors: dict[str, float] = {}
    ours = build(sizes)
    for way in (ORIGINAL, SDPA):
        peer = DenseEncoder(sizes, max(map(max, checked)), eager=way == ORIGINAL).train(False)
        peer.take(ours.state_dict())
        for batch in checked:
            ids, mask = _inputs(batch, sizes)
            with torch.inference_mode():
                found, true = ours(ids, mask).last_hidden_state, peer(ids, mask)
            seen = mask.bool()
            error = float((found - true)[seen].abs().max() / true[seen].abs().max())
            errors[way] = max(errors.get(way, 0.0), error)
    return errors


def _ours(config_class: Callable[..., object], model_class: Callable[..., nn.Module], sizes: Sizes) -> nn.Module:
    config = config_class(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=sizes.layers, pooler=False,
        num_attention_heads=sizes.heads, intermediate_size=sizes.inner, initializer_range=sizes.initializer_range,
    )  # fmt: skip
    torch.manual_seed(0)
    return model_class(config).train(False)


def _model(way: str, build: Build, sizes: Sizes, longest: int) -> nn.Module:
    torch.manual_seed(0)
    if way == OURS:
        return build(sizes)
    if way == BERT:
        return plain_bert(sizes, longest)
    return DenseEncoder(sizes, longest, eager=way == ORIGINAL).train(False)


def _inputs(batch: Sequence[int], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Random tokens of texts of these lengths, padded on the right, and their mask."""
    shape = (len(batch), max(batch))
    ids = torch.randint(1, sizes.vocabulary, shape, generator=torch.Generator().manual_seed(sum(batch)))
    mask = (torch.arange(shape[1]) < torch.tensor(batch)[:, None]).long()
    return ids * mask, mask


def _summary(errors: Mapping[str, float], curves: Columns) -> dict[str, float | None]:
    """The errors, how many times longer than ours each way takes, and what part of ours is attention, by length."""
    found: dict[str, float | None] = {f"error_against_{WAYS[way][0]}": error for way, error in errors.items()}
    ours = curves[OURS]
    for at, length in enumerate(ours["length"]):
        base, share = ours["forward_ms"][at], ours["attention_share"][at]
        found[f"attention_share_{length}"] = share if isinstance(share, float) else None
        for way, (name, _) in WAYS.items():
            time_ms = curves[way]["forward_ms"][at] if way in curves else None
            if way != OURS and isinstance(time_ms, float) and isinstance(base, float):
                found[f"speedup_over_{name}_{length}"] = time_ms / base
    return found
