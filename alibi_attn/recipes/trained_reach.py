"""How far do the heads of a trained model look, how far are they certified to look, and what is skipping worth on them?

Paper: none; this is the certificate's own question (docs/maths.md). A small ALiBi model is trained with the lab, its queries,
keys and values are captured on text it has not seen, at 8 times its trained length, and every head's certified reach is put
beside the distance at which the dropped mass really passes the tolerance, computed in float64.

Command: `alibi bench trained`. Cost: small, about four minutes on two cores; smoke, seconds.
Expected: certified reach within about a third of the true one in steep heads, both ending at the text's length in flat ones.
"""

import datetime
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from alibi_attn import records
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.validation import make_spec
from alibi_attn.bench.exactness import Reference, computed
from alibi_attn.bench.peers import cpu_peers
from alibi_attn.bench.timing import medians_ms
from alibi_attn.lab import checkpoint, experiment, one_run
from alibi_attn.lab.config import EvalConfig, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_attn.lab.data import Corpus, load_corpus
from alibi_attn.lab.model import Block, LanguageModel
from alibi_attn.slopes import alibi_slopes

Captured = dict[str, tuple[Tensor, Tensor, Tensor]]


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """One ALiBi model with eight heads."""
    if scale == "smoke":
        return (
            RunConfig(
                model=ModelConfig(method="alibi", num_layers=2, num_heads=8, embed_dim=64, ffn_dim=88),
                train=TrainConfig(length=32, steps=8, batch_tokens=256, warmup_steps=2),
                eval=EvalConfig(lengths=(32, 256), tokens=256, batch_tokens=256),
            ),
        )
    return (
        RunConfig(
            model=ModelConfig(method="alibi", num_layers=4, num_heads=8, embed_dim=256, ffn_dim=688),
            train=TrainConfig(length=512, steps=300, batch_tokens=4096, learning_rate=2e-3, warmup_steps=32),
            eval=EvalConfig(lengths=(512, 4096), tokens=16_384),
        ),
    )


RECIPE = Recipe(
    name="trained-reach",
    question="How far do the heads of a trained ALiBi model look, and how far are they certified to?",
    paper="none: the certificate of docs/maths.md, on trained weights",
    command="alibi bench trained",
    cost="small: about four minutes on two cores; smoke: seconds",
    expected="the certified reach is within a factor of two of the true one in steep heads",
    runs=runs,
)


def trained_reach(
    out: Path,
    *,
    scale: str = "small",
    run_folder: Path = Path("runs/trained-reach"),
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Train (or resume), capture, compare and time; one record a layer. The tensors stay in `run_folder`/captured.safetensors."""
    if scale not in ("smoke", "small"):
        raise ValueError(f"scale is {scale!r} but must be 'smoke' or 'small'")
    started = datetime.datetime.now(datetime.UTC)
    say("training")
    experiment.run(RECIPE, out=run_folder, scale=cast(Scale, scale))
    (config,) = runs(cast(Scale, scale))
    corpus = load_corpus(config.data, run_folder / "tokens")
    model = trained_model(run_folder, RECIPE, config, corpus)
    length = config.eval.lengths[-1]
    tokens = corpus.valid[None, :length]
    layers = captured(model, tokens.long())
    tensors = {
        f"{layer}.{name}": x
        for layer, qkv in layers.items()
        for name, x in zip(("query", "key", "value"), qkv, strict=True)
    }
    save_file({name: x.contiguous() for name, x in tensors.items()}, run_folder / "captured.safetensors")
    paths = []
    for layer, (query, key, value) in layers.items():
        columns = compare(query, key, value)
        timed = _timed(query, key, value)
        times = ", ".join(f"{name} {time:.0f} ms" for name, time in timed.items())
        say(f"{layer}: certified {columns['certified']}, true {columns['true']}; {times}")
        record = records.make(
            "certificate", f"trained-reach/{layer}",
            config={"scale": scale, "layer": layer, "length": length, "trained": config.train.length},
            metrics={f"{name} forward_ms": time for name, time in timed.items()},
            curves={"heads": columns, "mass": attention_by_distance(query, key)}, started=started,
        )  # fmt: skip
        paths.append(records.save(record, out))
    return paths


def trained_model(run_folder: Path, recipe: Recipe, config: RunConfig, corpus: Corpus) -> LanguageModel:
    """The model of a run that `experiment.run` has made in this folder."""
    folder = one_run.checkpoint_folder(run_folder, recipe.study or recipe.name, config, corpus)
    return checkpoint.load_checkpoint(folder)[0]


def captured(model: LanguageModel, tokens: Tensor) -> Captured:
    """(query, key, value), each [1, H, n, D], of every layer of the model on one text [1, n]."""
    heads = model.config.num_heads
    found: Captured = {}
    for layer, part in outputs_of(model, tokens, ("q", "k", "v")).items():
        query, key, value = (part[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k", "v"))
        found[layer] = query, key, value
    return found


def outputs_of(model: LanguageModel, tokens: Tensor, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """What the named parts of every block, "layer-0" and on, give for one text [1, n]: [1, n, E] each."""
    parts: dict[str, dict[str, Tensor]] = {}
    hooks = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for index, block in enumerate(blocks):
        for name in names:

            def keep(
                module: torch.nn.Module,
                inputs: object,
                output: Tensor,
                *,
                layer: str = f"layer-{index}",
                name: str = name,
            ) -> None:
                parts.setdefault(layer, {})[name] = output

            hooks.append(getattr(block, name).register_forward_hook(keep))
    try:
        with torch.no_grad():
            model.eval()(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return parts


def compare(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Sequence[records.Json]]:
    """Per head: slope, certified reach (widest and mean over blocks), and the true distance that keeps all but the tolerance."""
    n = query.shape[2]
    spec = make_spec(query, key, value)
    with torch.no_grad():
        found = bounds(spec, query, key, value)
        certified = found.left[0].clamp(max=n)
        true = torch.stack(
            [
                _true_reach(spec.scale, query[0, h], key[0, h], float(spec.slopes[h]), spec.tolerance)
                for h in range(spec.num_heads)
            ]
        )
    blocks = torch.nn.functional.pad(true, (0, -n % TILE)).unflatten(-1, (-1, TILE)).amax(-1)
    return {
        "head": list(range(spec.num_heads)),
        "slope": [float(m) for m in alibi_slopes(spec.num_heads)],
        "certified": certified.amax(-1).tolist(),
        "certified_mean": certified.double().mean(-1).tolist(),
        "true": true.amax(-1).tolist(),
        "true_mean": blocks.double().mean(-1).tolist(),
        "pinned_tiles": (found.outlier_tiles[0] >= 0).sum(-1).tolist(),
        "longest_key": key[0].norm(dim=-1).amax(-1).tolist(),
        "median_key": key[0].norm(dim=-1).median(-1).values.tolist(),
    }


def attention_by_distance(query: Tensor, key: Tensor) -> dict[str, Sequence[records.Json]]:
    """Per head, the share of its attention that goes to keys nearer than a distance, the mean over the queries, in float64."""
    n, num_heads = query.shape[2], query.shape[1]
    scale, i = query.shape[-1] ** -0.5, torch.arange(n)
    distances = [2**power for power in range(math.ceil(math.log2(n)) + 1)]
    shares: list[float] = []
    for head, slope in enumerate(alibi_slopes(num_heads).tolist()):
        mass = torch.zeros(len(distances), dtype=torch.float64)
        for start in range(0, n, 256):
            rows = i[start : start + 256]
            distance = rows[:, None] - i
            scores = scale * (query[0, head, rows].double() @ key[0, head].double().T) - slope * distance
            weight = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
            mass += torch.stack([weight.masked_fill(distance >= limit, 0).sum() for limit in distances])
        shares += (mass / n).tolist()
    return {
        "head": [head for head in range(num_heads) for _ in distances],
        "distance": distances * num_heads,
        "share": shares,
    }


def _true_reach(scale: float, query: Tensor, key: Tensor, slope: float, tolerance: float) -> Tensor:
    """[n] int64: for every query the smallest r whose keys at i − j ≥ r weigh at most the tolerance, in float64."""
    n = query.shape[0]
    i = torch.arange(n)
    reach = torch.empty(n, dtype=torch.int64)
    for start in range(0, n, 256):
        rows = i[start : start + 256]
        distance = rows[:, None] - i
        scores = scale * (query[rows].double() @ key.double().T) - slope * distance
        weight = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        # Mass of the keys 0 … j: those keys may go while it is at most the tolerance.
        dropped = (weight.cumsum(-1) <= tolerance).sum(-1)
        reach[rows] = rows - dropped + 1
    return reach


def _timed(query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Milliseconds forward, of ours and of attention without a bias; both are held against fp64 first."""
    slopes = torch.tensor(alibi_slopes(query.shape[1]), dtype=torch.float32)
    query, key, value = (x.contiguous() for x in (query, key, value))
    reference = Reference.of(query, key, value, torch.ones_like(query), slopes)
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        for peer in cpu_peers():
            if peer.name in ("ours", "causal, no bias"):
                attention = peer.prepare(query, key, value, slopes)
                errors = reference.compare(peer, computed(attention, query, key, value, None))
                if errors.wrong is not None:
                    raise RuntimeError(errors.wrong)
                calls[peer.name] = partial(attention, query, key, value)
        return medians_ms(calls, repeats=7, budget_s=10.0)
