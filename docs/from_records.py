"""Generates the pictures and speed tables of README.md and docs/ from the records in results/.

    python docs/from_records.py            # after renewing a record; a test fails until you do

The report's code draws the pictures. The text between `<!-- from records: NAME -->` and `<!-- end -->` in a document is
generated, where NAME is one of `TEXTS`; do not edit it there.
"""

import dataclasses
import fnmatch
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from alibi_lab.lab.model.positions import METHODS
from alibi_lab.position_methods import LOOKS
from alibi_lab.recipes import quick
from alibi_lab.records import Record, find, key
from alibi_lab.report import plot_alibi_bias, rollouts
from alibi_lab.report.intervals import first_worse
from alibi_lab.report.plots import drawing
from alibi_lab.report.plots import study as figures
from alibi_lab.report.plots.drawing import css
from alibi_lab.report.section import Archive
from alibi_lab.report.sections.benchmark import OURS, peer_times, times_by_length
from alibi_lab.report.sections.method_comparison import (
    Task,
    by_seed_of,
    comparisons,
    dropped_beats_alibi,
    measured,
    methods,
    score_text,
)
from alibi_lab.report.series import Mode, Study, numbers, studies
from alibi_lab.report.verdicts import Verdict, all_verdicts

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in ("performance", "gates", "paper", "lab", "lab-results")))
MARKED = re.compile(r"(<!-- from records: ([\w-]+) -->)\n.*?\n?(<!-- end -->)", re.DOTALL)
# Records, as FILE#KEY|KEY in results/: of a command of an earlier version, and of the present one; on other processors than the
# first, the file is the processor's.
HASH = "-" + "[0-9a-f]" * 12
NOISE = "benchmark-attention-{}-noise-8x64"
CPU = "{}#benchmark-cpu-noise-*|" + NOISE.format("cpu-float32") + HASH
BF16 = "{}#benchmark-cpu-bf16-noise-*|" + NOISE.format("cpu-bfloat16") + HASH
BATCH = "{0}#benchmark-cpu-batch-{1}-noise-*|" + NOISE.format("cpu-float32") + "-batch-{1}-*"
ENCODER = "models#benchmark-embedding-{}-{}-*|benchmark-models-encoder-pass{}-{}" + HASH
SERVING = "models#benchmark-models-{}-pass-float32" + HASH
JAX, BATCHES = "attention#benchmark-jax-cpu-noise-*|" + NOISE.format("jax-cpu-float32") + HASH, (16, 8)
GPU, GPU_KERNELS = "attention#benchmark-gpu-noise-16x128-*", "models#benchmark-gpu-models-kernels-*"
GPU_GRAPHS = "models#benchmark-gpu-models-graphs-*"
ATTENTION = {"forward_kernel": "forward", "query_kernel": "queries", "key_kernel": "keys"}
MODELS = {
    "gates": "gates",
    "masked": "masked",
    "bloom-[0-9a-f]": "BLOOM",
    "encoder-" + "[0-9a-f]" * 12: "encoder",
    "decoding": "one more token",
}
NEXT_TOKENS = "models#benchmark-next-tokens-bloom-*"
TRAINING, GENERATING = (
    "training#benchmark-training-medium-*",
    "models#benchmark-generating-bloom-*|benchmark-models-bloom-step-float32-*",
)
# The processors whose attention was measured, by the file of their records.
PROCESSORS = {"attention": "Zen 5", "amx": "Xeon", "zen4": "Zen 4", "avx2": "AVX2 only"}
WITH_AVX_512 = [name for name in PROCESSORS if name != "avx2"]
FAMILIES = {"bloom": "BLOOM", "mpt": "MPT", "falcon": "Falcon-RW"}
NO_BIAS, DENSE_BIAS = "SDPA, causal, no bias", "SDPA, dense bias"
# The peers of the picture and of the tables: the name in the record, and the name shown.
SHOWN = {OURS: OURS, "causal, no bias": NO_BIAS, "SDPA + dense bias": DENSE_BIAS}
TABLED = SHOWN | {"rank-2 trick": "bias as two more dimensions", "ours, no compiler": "ours without a compiler"}
CALLED = TABLED | {"eager": "dense bias, eager"}
MODEL_PEERS = ("llama.cpp", "llama.cpp, flash attention", "CTranslate2")
ENCODERS = {
    OURS: OURS, "original: dense bias, eager": "original: dense bias, eager", "SDPA + dense bias": DENSE_BIAS,
    "ONNX Runtime": "ONNX Runtime", "llama.cpp": "llama.cpp", "llama.cpp, flash attention": "llama.cpp, flash attention",
    "BERT, SDPA, no bias": "BERT without any bias",
}  # fmt: skip
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}
# Figure 1: the folder of its evaluations, and the trained length that stands for the paper's 512.
QUARTER, EIGHTH = ("medium", 128), ("paper", 64)
LIGHT = "--paper: #ffffff; --ink: #1d2430; --muted: #5d6675; --rule: #dcd9d2;"
DARK = "--paper: #15181d; --ink: #e7e9ed; --muted: #a2abb8; --rule: #343a43;"


@functools.cache
def packed(file: str) -> Mapping[str, Record]:
    """The records of a file in results/, by key."""
    return {key(one): one for one in find(ROOT / "results" / f"{file}.jsonl")}


def record(pattern: str, **config: object) -> Record:
    """The newest record that matches a pattern of FILE#KEY|KEY and has no other value of these entries in its config."""
    file, _, keys = pattern.partition("#")
    found = [
        one for name, one in packed(file).items() if any(fnmatch.fnmatchcase(name, key) for key in keys.split("|"))
    ]
    fitting = [one for one in found if all(one.config.get(name, value) == value for name, value in config.items())]
    if not fitting:
        raise SystemExit(f"none of the {len(found)} records {pattern} has {config}; pass values that one has")
    return max(fitting, key=lambda one: one.started)


def of_peers(pattern: str, peers: Mapping[str, str]) -> Record:
    """A record with only these peers, renamed."""
    whole = record(pattern, dropout=0.0)
    return dataclasses.replace(whole, curves={new: whole.curves[old] for old, new in peers.items()})


@functools.cache
def figure_1(folder: str, trained: int) -> Study:
    """The study of `alibi run figure-1` at this trained length with the most tested lengths."""
    found = studies(
        one for name, one in packed(folder).items() if re.match(f"evaluation-wikitext-.*-{trained}-seed", name)
    )
    whole = [study for study in found if [series.method for series in study.series] == list(quick.COMPARED)]
    return max(whole, key=lambda study: len(study.lengths))


def figure_1_picture(mode: Mode) -> Figure:
    """Perplexity against length, drawn once or with a sliding window."""
    figure = figures.figure_of(figure_1(*QUARTER), mode)
    assert figure is not None
    return figure


@dataclasses.dataclass(frozen=True)
class Picture:
    """One SVG file: its description for screen readers, the figure, and the points to add for names at its right."""

    description: str
    figure: Callable[[], Figure]
    room: int = 0


PICTURES = {
    "heads": Picture(
        "The biases of eight heads as triangles: the steepest head attends to the nearest tokens, the flattest to all.",
        lambda: plot_alibi_bias(8, 256),
    ),
    "train-short-test-long": Picture(
        "Perplexity against the length a model is tested at: ALiBi stays level; sinusoidal, rotary and T5 bias rise.",
        lambda: figure_1_picture("nonoverlapping"),
    ),
    "figure-1-sliding": Picture(
        "The same with a sliding window: ALiBi stays level, the others rise, and sooner.",
        lambda: figure_1_picture("sliding"),
    ),
    "speed": Picture(
        "Milliseconds of attention against tokens: ours grows linearly, the others with the square.",
        lambda: times_by_length(of_peers(CPU.format("attention"), SHOWN)),
        room=44,
    ),
    "encoders": Picture(
        "Milliseconds of a whole encoder against the length of its text.",
        lambda: times_by_length(of_peers(_encoder("texts", "float32"), ENCODERS)),
        room=52,
    ),
    "jax": Picture(
        "Milliseconds of attention in JAX, forward and backward, against tokens.",
        lambda: times_by_length(of_peers(JAX, {OURS: OURS, "dense bias": "jax.nn, dense bias"})),
        room=44,
    ),
    "serving-bloom": Picture(
        "Milliseconds of a BLOOM of two layers against tokens, patched and as transformers has it.",
        lambda: times_by_length(record(SERVING.format("bloom"))),
        room=52,
    ),
}


def drawn(name: str) -> str:
    """A picture as a complete SVG file, light or dark like the reader's system."""
    picture = PICTURES[name]
    text = drawing.svg(picture.figure(), name, picture.description)
    found = re.search(r' viewBox="0 0 (\S+) (\S+)"', text)
    assert found is not None
    width, height = float(found[1]) + picture.room, float(found[2])
    size = f' width="{width:g}pt" height="{height:g}pt" viewBox="0 0 {width:g} {height:g}"'
    style = (
        f"<style>svg {{ {LIGHT} {css('light')} background: var(--paper); font-family: system-ui, sans-serif }}"
        f" @media (prefers-color-scheme: dark) {{ svg {{ {DARK} {css('dark')} }} }}"
        " * { stroke-linejoin: round; stroke-linecap: butt }</style>"
    )
    head, _, rest = text.replace(found[0], size, 1).partition(">")
    return f"{head}>{style}{rest}\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("|" + "|".join(cells) + "|" for cells in [head, ["---"] * len(head), *rows])


def ratios(found: Record) -> dict[str, dict[int, float]]:
    """For each peer and length, its time relative to ours; ours in milliseconds."""
    times = {peer.name: peer.times for peer in peer_times(found)}
    return {
        name: {length: time if name == OURS else time / times[OURS][length] for length, time in of_peer.items()}
        for name, of_peer in times.items()
    }


def front() -> str:
    """What the README promises, one number per sentence, and when to use something else."""
    study = figure_1(*QUARTER)
    ends = {series.method: np.mean(np.exp(series.curve("by_length", "length", "nonoverlapping_nats")[1]), axis=0)
            for series in study.series}  # fmt: skip
    assert ends["alibi"][-1] < ends["alibi"][0]
    times, rise = study.lengths[-1] / study.lengths[0], ends["rotary"][-1] / ends["rotary"][0]
    slower = [ratios(of_peers(CPU.format(folder), SHOWN))[NO_BIAS][8192] for folder in PROCESSORS]
    assert len(slower) == 4
    ours, cudnn = _kernel_times(record(GPU_KERNELS))
    long, short = max(cudnn), min(cudnn)
    beats_rotary = next(
        one for one in verdicts_on("medium") if one.claim.says == "at L = 512 ALiBi is better than rotary"
    )
    assert beats_rotary.interval is not None
    worse = [100 * (end - 1) for end in (beats_rotary.interval.low, beats_rotary.interval.high)]
    assert worse[0] > 0
    return (
        f"* **It reads on.** At {times:.0f} times the trained length, rotary positions have {rise:.1f} times the perplexity "
        "that they\n"
        "  have at the trained length. That of ALiBi does not rise ([details](docs/paper.md#figure-1-at-a-quarter)).\n"
        "* **It is fast on a CPU.** PyTorch's attention *without any bias* takes\n"
        f"  {min(slower):.1f} to {max(slower):.1f} times as long at 8,192 tokens in fp32, on "
        "[four processors](docs/performance.md).\n"
        "* **It is fast on a GPU.** On an H200, cuDNN's kernels *without any bias* take\n"
        f"  {cudnn[long] / ours[long]:.1f} times as long at {long:,} tokens in bf16 ([GPU](docs/performance.md#on-a-gpu)).\n"
        "* **It is exact.** [100,000 random calls](docs/design.md#correctness) and their gradients agree with float64, and\n"
        "  [a proof](docs/maths.md) limits what is skipped.\n\n"
        "**Use something else** for existing models with rotary positions (Llama, Qwen, Mistral): positions cannot be\n"
        "exchanged without [training](docs/hf.md#fine-tune-to-long). Prefer them also in a new model that\n"
        f"never reads beyond its trained length: there ALiBi's perplexity was {worse[0]:.0f} to {worse[1]:.0f} %\n"
        "[higher](docs/paper.md#figure-1-at-a-quarter). Short texts gain little on a GPU: for\n"
        f"8 × {short:,} tokens cuDNN without a bias takes only {cudnn[short] / ours[short]:.1f} times as long."
    )


def _kernel_times(found: Record) -> tuple[dict[int, float], dict[int, float]]:
    """(our milliseconds by length, cuDNN's): the sum of the kernels of a training step."""
    sums: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for name in found.curves:
        for length, ms in _by_length(found, name, "ms").items():
            sums[not name.startswith(OURS)][int(length)] += ms
    return sums


def cpu() -> str:
    """Attention on a CPU at every length."""
    return table(["tokens", *TABLED.values()], _cpu_rows("attention"))


def processors() -> str:
    """The same at some lengths on other processors."""
    lengths = (512, 2048, 8192, 16384, 32768)
    rows = [
        [name, *row]
        for folder, name in PROCESSORS.items()
        if folder != "attention"
        for row in _cpu_rows(folder, lengths)
    ]
    return table(["", "tokens", *TABLED.values()], rows)


def bf16() -> str:
    """Attention in bf16 by processor, compared with the same inputs in fp32."""
    peers = ["ours, fp32", "causal, no bias", "SDPA + dense bias"]
    rows = [
        [name, f"{length:,.0f}", _time(ms), *ratios]
        for folder, name in PROCESSORS.items()
        for length, ms, ratios in _relative(record(BF16.format(folder)), OURS, peers)
    ]
    return table(["", "tokens", OURS, *(CALLED.get(name, name) for name in peers)], rows)


def short() -> str:
    """Many short sequences, as in training."""
    peers = ["causal, no bias", "SDPA + dense bias", "rank-2 trick", "eager"]
    rows = [
        [f"{batch} × {length:,.0f}", PROCESSORS[folder], _time(ms), *ratios]
        for batch in BATCHES
        for folder in PROCESSORS
        if any("-batch-" in name for name in packed(folder))
        for length, ms, ratios in _relative(record(BATCH.format(folder, batch)), OURS, peers)
    ]
    return table(["rows × tokens", "", OURS, *(CALLED.get(name, name) for name in peers)], rows)


def gpu() -> str:
    """Attention on a GPU, 16,384 tokens per batch or one sequence, and its peers' times relative to it."""
    peers = {
        "causal, no bias": NO_BIAS, "causal, no bias, cuDNN": "cuDNN, no bias", "causal, no bias, flash": "flash, no bias",
        "FlexAttention": "FlexAttention, ALiBi", "SDPA + dense bias": DENSE_BIAS, "rank-2 trick": TABLED["rank-2 trick"],
    }  # fmt: skip
    rows = [
        [f"{max(1, round(16384 / length))} × {length:,.0f}", _time(ms), *ratios]
        for length, ms, ratios in _relative(record(GPU), OURS, list(peers))
        if math.isfinite(ms)
    ]
    return table(["rows × tokens", OURS, *peers.values()], rows)


def gpu_kernels() -> str:
    """The kernels of a training step on a GPU: their sum, and the sum of cuDNN's without a bias relative to it."""
    found = record(GPU_KERNELS)
    ours, peer = _kernel_times(found)
    parts = [_by_length(found, f"{OURS}: {name}", "ms") for name in ATTENTION]
    rows = [
        [
            f"{max(1, round(16384 / n))} × {n:,}",
            f"{ms:.2f} ms",
            *(f"{part[n]:.2f}" for part in parts),
            _ratio(peer[n] / ms or None),
        ]
        for n, ms in sorted(ours.items())
    ]
    return table(["rows × tokens", OURS, *ATTENTION.values(), "cuDNN, no bias"], rows)


def gpu_models() -> str:
    """Whole calls on a GPU, eager and as a CUDA graph: forward + backward, of BLOOM forward."""
    rows = []
    peers = "SDPA, no bias, cuDNN", "SDPA + mask, no bias", "original", "SDPA + dense bias", "SDPA, no bias"
    for (part, called), peer in zip(MODELS.items(), peers, strict=True):
        found = record(f"models#benchmark-gpu-models-{part}*")
        batches = _by_length(found, OURS, "batch")
        for n in _whole(found, OURS):
            ways = [_whole(found, f"{name}{way}").get(n) for name in (OURS, peer) for way in ("", ", graph")]
            cells = ["–" if x is None else f"{x:.3f}" if x < 0.1 else f"{x:.2f}" for x in ways]
            rows.append([f"{called}, {batches[n]:.0f} × {n:,.0f}", *cells])
    return table(["ms", OURS, "ours, graph", "peer", "peer, graph"], rows)


def _whole(found: Record, name: str) -> dict[float, float]:
    """Milliseconds by length: forward, and backward if it was measured."""
    if name not in found.curves:
        return {}
    columns = [_by_length(found, name, column) for column in ("forward_ms", "backward_ms")]
    times = [column for column in columns if any(map(math.isfinite, column.values()))]
    sums = {n: sum(each[n] for each in times) for n in columns[0]}
    return {n: ms for n, ms in sums.items() if math.isfinite(ms) and times}


def dropout() -> str:
    """How much longer attention with dropout takes."""
    found = record(f"attention#benchmark-cpu-dropout-noise-*|{NOISE.format('cpu-float32')}{HASH}", dropout=0.1)
    return _relative_times(found, OURS, "tokens", ["ours, dropout", "causal, no bias"], CALLED)


def decoding() -> str:
    """One new token with a cache."""
    found = record("decoding#benchmark-decoding-cpu-*")
    return _relative_times(
        found, OURS, "cached tokens", ["ours, all keys", "SDPA + dense bias", "causal, no bias", "eager"], CALLED
    )


def encoders() -> str:
    """A whole encoder on single texts and on a mixed batch, by precision: our time, and each peer's relative to it."""
    rows, peers = [], [name for name in ENCODERS if name != OURS]
    for precision, called in PRECISIONS.items():
        for texts in ("texts", "mixed"):
            found = record(_encoder(texts, precision))
            for length, _, ratios in _relative(found, OURS, peers):
                text = f"{length:,.0f}" if texts == "texts" else texts
                rows.append([called, text, _pass(found, OURS, length), *ratios])
    return table(["", "tokens", *ENCODERS.values()], rows)


def _encoder(texts: str, precision: str) -> str:
    return ENCODER.format(texts, precision, "-mixed" if texts == "mixed" else "", precision)


def next_tokens() -> str:
    """Decoding after a prompt with a patched BLOOM in three precisions, and its peers' times relative to it."""
    rows = []
    for layers in (2, 24):
        found = record(NEXT_TOKENS, layers=layers)
        for precision, called in PRECISIONS.items():
            ours, *peers = (f"{name}, {precision}" for name in (OURS, *MODEL_PEERS))
            for length, ms, ratios in _relative(found, ours, peers):
                rows.append([f"{layers}", called, f"{length:,.0f}", _time(ms), *ratios])
    return table(["layers", "", "tokens before", "ours", *MODEL_PEERS], rows)


def serving() -> str:
    """One forward pass of a decoder, patched and unmodified."""
    rows = []
    for family, called in FAMILIES.items():
        found = record(SERVING.format(family))
        ours, theirs = (_by_length(found, name, "forward_ms") for name in (OURS, "transformers"))
        for length in ours:
            attention = [_attention_ms(found, name, length) for name in ("transformers", OURS)]
            speedups = [theirs.get(length, math.nan) / ours[length], attention[0] / attention[1]]
            unmodified = _pass(found, "transformers", length) if length in theirs else "–"
            rows.append([called, f"{length:,.0f}", _pass(found, OURS, length), unmodified, *map(_ratio, speedups)])
    return table(["model", "tokens", "patched", "unmodified", "times", "times, attention alone"], rows)


def _attention_ms(found: Record, name: str, length: float) -> float:
    """The milliseconds of a pass that are attention without its linear layers."""
    ms, share = (_by_length(found, name, column).get(length, math.nan) for column in ("forward_ms", "attention_share"))
    return ms * share


def serving_peers() -> str:
    """One forward pass of a patched BLOOM, and its peers' times relative to it."""
    return _relative_times(record("models#benchmark-serving-bloom-*"), OURS, "tokens")


def generating() -> str:
    """Decoding one token of a BLOOM with a cache."""
    ways = {
        "transformers": "as `transformers` has it", "transformers, StaticCache": "with its `StaticCache`",
        "patched, DynamicCache": "patched", OURS: "patched, with `ALiBiCache`",
    }  # fmt: skip
    found = record(GENERATING)
    times = [_by_length(found, name, "forward_ms") for name in ways]
    rows = [[f"{length:,.0f}", *(_time(of_way[length]) for of_way in times)] for length in times[-1]]
    return table(["cached tokens", *ways.values()], rows)


def training() -> str:
    """Training steps of the lab in both precisions, and the share of the matrix rate they reach."""
    found, rows = record(TRAINING), []
    methods = dict.fromkeys(name.partition(", ")[0] for name in found.curves)
    columns = ("step_ms", "tokens_per_second", "achieved_gflops", "matrix_gflops", "utilization")
    for method in methods:
        of = {half: [_by_length(found, f"{method}, {half}", column) for column in columns] for half in ("fp32", "bf16")}
        for length in of["fp32"][0]:
            cells = []
            for of_columns in of.values():
                ms, speed, achieved, rate, share = (column[length] for column in of_columns)
                cells += [f"{ms:.0f}\u00a0ms", f"{speed:,.0f}", f"{achieved:.0f} of {rate:.0f}", f"{share:.0%}"]
            rows.append([LOOKS[method].label, f"{length:,.0f}", *cells])
    head = [f"{words}, {half}" for half in ("fp32", "bf16") for words in ("a step", "tokens/s", "GFLOP/s", "share")]
    return table(["method", "tokens", *head], rows)


@functools.cache
def referee_tasks() -> list[Task]:
    """The text and the tasks of `alibi run referee`."""
    (tasks,) = comparisons(studies(packed("referee").values()))
    return tasks


def methods_of_the_lab() -> str:
    """The built-in position methods, from their table and their classes."""
    rows = [
        [
            f"`{name}`",
            look.meaning.replace("|", "\\|"),
            look.learned,
            "yes" if METHODS[name].relative else "no",
            ", ".join(f"`{stretch}`" for stretch in METHODS[name].stretches),
        ]
        for name, look in LOOKS.items()
    ]
    head = ["`model.method`", "where position enters", "learned", "several documents per row", "`eval.stretch`"]
    return table(head, rows)


def needles() -> str:
    """The verdict on DroPE's claim."""
    return dropped_beats_alibi(referee_tasks())


@functools.cache
def rollout_records() -> list[Record]:
    """The records of attention accumulated over layers."""
    return [one for one in packed("rollout").values() if one.kind == "rollout"]


def rollout() -> str:
    """The first token's share of accumulated attention in trained models (mean and range of the seeds) and in theory."""
    trained = rollouts.models(rollout_records())
    (theory,) = (one for one in rollout_records() if one.name == rollouts.THEORY)
    shown = (8, 12)

    def cells(members: Sequence[Record], way: str, depths: Sequence[int]) -> list[str]:
        found = []
        for depth in depths:
            values = [100 * rollouts.by_depth(one, way, "first_token").get(depth, math.nan) for one in members]
            spread = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
            found.append(f"{np.mean(values):.1f}{spread}" if np.isfinite(values).all() else "")
        return found

    rows = [
        [
            rollouts.label_of(name, members[0]),
            *cells(members, rollouts.PLAIN, shown),
            *cells(members, rollouts.RESIDUAL, (12,)),
        ]
        for name, members in trained.items()
    ]
    ways = {"causal mask": "causal mask, scores of 0", "ALiBi, 8 heads": "ALiBi, scores of 0"}
    for way, name in ways.items():
        of_depth = {depth: cells([theory], way, (depth,))[0] for depth in shown[:1]}
        rows.append([name, *of_depth.values(), "", ""])
    return table(["", *(f"{depth} layers" for depth in shown), "12, with residual"], rows)


def rollout_claims() -> str:
    """The verdicts on both claims about accumulated attention."""
    return "\n".join(
        f"* {one.claim.says[0].upper()}{one.claim.says[1:]}: {one.word}. Ratio {one.ours:.3g} ({bounds.low:.3g} to "
        f"{bounds.high:.3g}, over {bounds.over})."
        for one in rollouts.claims(rollout_records())
        if (bounds := one.interval)
    )


def referee() -> str:
    """At the longest length, mean and range over seeds: relative perplexity on text, per cent of right answers on tasks."""
    tasks = referee_tasks()
    longest = tasks[0].lengths[1]
    rows = []
    for series in methods(tasks):
        cells = []
        for task in tasks:
            seeds = sorted(by_seed_of(task, series.method, longest))
            shown = seeds[0], measured(task, series.method, longest).value, seeds[-1]
            low, mean, high = (score_text(task, value) for value in shown)
            cells.append(f"{mean} ({low}–{high})")
        rows.append([series.label, *cells])
    return table(["", *(f"{task.title}, {longest:,}" for task in tasks)], rows)


def gates() -> str:
    """Forget gates by how open they are: causal SDPA's time over ours, and our scores as a share of ACP's."""
    rows = []
    for logit in (2, 4, 6):
        found = record(
            f"attention#benchmark-gates-logit-{logit}-U-8-*|benchmark-attention-cpu-float32-gates-{logit}-U-8-8x64-*"
        )
        ours, acp = (_by_length(found, "scores", name) for name in ("ours", "acp"))
        cells = [
            f"{ratios[0]}, {ours[length] / acp[length]:.2f}"
            for length, _, ratios in _relative(found, OURS, ["causal, no bias"])
        ]
        rows.append([str(logit), *cells])
    return table(["logit", *(f"{length:,.0f}" for length in ours)], rows)


def context_parallel() -> str:
    """Halos by length and number of processes: rows received, our time, and an all-gather's relative to it."""
    rows = []
    for ranks in (2, 4):
        found = record(f"context-parallel#benchmark-context-parallel-ranks-{ranks}-*")
        received, of_all = (_by_length(found, name, "rows_received") for name in (OURS, "all-gather"))
        for length, ms, ratios in _relative(found, OURS, ["all-gather"]):
            share = f"1 in {of_all[length] / received[length]:.1f}"
            rows.append([f"{length:,.0f}", str(ranks), f"{received[length]:,.0f}", share, _time(ms), *ratios])
    return table(["tokens", "processes", "rows received", "of an all-gather", "ours", "all-gather"], rows)


def jax() -> str:
    """Attention in JAX, and its peers' times relative to it."""
    return _relative_times(record(JAX), OURS, "tokens", ["PyTorch", "causal, no bias", "dense bias", "ours, the loop"])


def extrapolation(folder: str, trained: int) -> str:
    """Perplexity at the trained and the longest length, with its range over seeds, and where it becomes worse."""
    study, rows = figure_1(folder, trained), []
    for series in study.series:
        ends = [np.exp(series.curve("by_length", "length", f"{mode}_nats")[1]).T[end]
                for mode in ("nonoverlapping", "sliding") for end in (0, -1)]  # fmt: skip
        ranges = [f" ({one.min():.1f}–{one.max():.1f})" if len(one) > 1 else "" for one in ends[:2]] + ["", ""]
        cells = [f"{one.mean():.1f}{spread}" for one, spread in zip(ends, ranges, strict=True)]
        worse = first_worse(series, "nonoverlapping") or (trained, None)
        rows.append([LOOKS[series.method].label, *cells, f"{worse[1]:,}" if worse[1] else "nowhere"])
    first, last = study.lengths[0], study.lengths[-1]
    at = [f"at {first}", f"at {last:,}", f"sliding, {first}", f"sliding, {last:,}"]
    head = [f"trained at {trained}", *at, "worse from"]
    return table(head, rows)


def longer_examples() -> str:
    """Table 5 at a quarter: perplexity of models trained at several lengths."""
    found, rows = record("medium#paper-item-table-5-*"), []
    perplexities = {label: _by_length(found, label, "perplexity") for label in found.curves}
    lengths = sorted({length for at in perplexities.values() for length in at})
    for label, at in sorted(perplexities.items(), key=lambda one: (one[0].split(",")[0], min(one[1]))):
        method, _, paper_length = label.partition(", L = ")
        trained = f"{min(at):.0f}" if paper_length.isdecimal() else "each"
        cells = [f"{at[length]:.1f}" if length in at else "" for length in lengths]
        rows.append([f"{method}, trained at {trained}", *cells])
    return table(["", *(f"at {length:.0f}" for length in lengths)], rows)


@functools.cache
def verdicts_on(folder: str) -> list[Verdict]:
    """The verdicts on the paper's claims at the size of a folder of results."""
    archive = Archive(packed(folder).values())
    return [verdict for _, verdict in all_verdicts(archive.records, archive.by_identity)]


def judged(folder: str) -> str:
    """How many of the paper's claims are contradicted, confirmed and open."""
    counts = Counter(verdict.word for verdict in verdicts_on(folder))
    counted = ", ".join(f"{counts[word]} {word}" for word in ("contradicted", "confirmed", "open"))
    return f"Of {counts.total()} claims of the paper ([how they are judged](#verdicts)): {counted}."


_OWN_NAMES = (front, cpu, processors, gpu, gpu_kernels, gpu_models, bf16, short, dropout, decoding, encoders, next_tokens,
              serving, serving_peers, generating, training, referee, needles, rollout, rollout_claims,
              gates, context_parallel, jax, longer_examples)  # fmt: skip
TEXTS = {function.__name__.replace("_", "-"): function for function in _OWN_NAMES} | {
    "methods": methods_of_the_lab,
    "quarter": functools.partial(extrapolation, *QUARTER),
    "quarter-256": functools.partial(extrapolation, "medium", 256),
    "quarter-768": functools.partial(extrapolation, "medium", 768),
    "eighth": functools.partial(extrapolation, *EIGHTH),
    "judged-quarter": functools.partial(judged, "medium"),
    "judged": functools.partial(judged, "paper"),
}


def renewed(document: str) -> str:
    """The text of a document with everything between its markers regenerated."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TEXTS[match[2]]()}\n{match[3]}", document)


def _cpu_rows(folder: str, lengths: Sequence[int] = ()) -> list[list[str]]:
    """Attention on a CPU at these lengths, or at all: length, our time, and the peers' relative to it."""
    found = ratios(of_peers(CPU.format(folder), TABLED))
    return [
        [f"{length:,}", _time(ours), *(_ratio(found[name].get(length)) for name in TABLED.values() if name != OURS)]
        for length, ours in sorted(found[OURS].items())
        if not lengths or length in lengths
    ]


def _by_length(found: Record, name: str, column: str) -> dict[float, float]:
    return dict(zip(numbers(found, name, "length"), numbers(found, name, column), strict=True))


def _pass(found: Record, name: str, length: float) -> str:
    """Time and memory of one pass."""
    ms, size = (_by_length(found, name, column).get(length, 0.0) for column in ("forward_ms", "peak_memory_bytes"))
    return f"{_time(ms)}, {size / 2**30:.1f} GiB"


def _relative_times(
    found: Record, ours: str, axis: str, peers: Sequence[str] = MODEL_PEERS, called: Mapping[str, str] | None = None
) -> str:
    """Our time and each measured peer's relative to it, by length. `called` renames peers."""
    peers = [name for name in peers if name in found.curves]
    rows = [[f"{length:,.0f}", _time(ms), *ratios] for length, ms, ratios in _relative(found, ours, peers)]
    return table([axis, "ours", *((called or {}).get(name, name) for name in peers)], rows)


def _relative(found: Record, ours: str, peers: Sequence[str]) -> list[tuple[float, float, list[str]]]:
    """(length, our time, each peer's relative to it) where a peer was measured; times include backward if measured."""

    def times(name: str) -> dict[float, float]:
        if name not in found.curves:
            return {}
        columns = ("forward_ms", "backward_ms") if "backward_ms" in found.curves[name] else ("forward_ms",)
        of_columns = [_by_length(found, name, column) for column in columns]
        return {length: sum(column[length] for column in of_columns) for length in of_columns[0]}

    of_peers = [times(name) for name in peers]
    return [
        (length, ms, [_ratio(of_peer.get(length, math.nan) / ms) for of_peer in of_peers])
        for length, ms in times(ours).items()
        if any(length in of_peer for of_peer in of_peers)
    ]


def _time(ms: float) -> str:
    if ms < 20:
        return f"{ms:.1f}\u00a0ms"
    return f"{ms:.0f}\u00a0ms" if ms < 1000 else f"{ms / 1000:.1f}\u00a0s"


def _ratio(times: float | None) -> str:
    return "–" if times is None or not math.isfinite(times) else f"{times:.1f}×"


def main() -> None:
    """Regenerate every picture and every document."""
    for name in PICTURES:
        (ROOT / "docs" / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
