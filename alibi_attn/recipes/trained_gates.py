"""What are certified gates worth on the gates that a model has learned?

Paper: none; the noise of `alibi bench gates` has gates of one kind, a model has heads that forget at once and heads that keep.
Two small models are trained with the lab, with forget gates alone and with gates beside ALiBi's slopes; queries, keys, values and
gates of all layers are captured on text that they have not seen, and measured as the noise is: times, the scores that are
computed, and those inside of ACP's boundary. Layers stand side by side as the sequences of one batch.

Command: `alibi bench trained-gates`. Cost: small, about five minutes on two cores; smoke, seconds.
Expected: fewer scores than ACP's boundary asks for, which takes one bound of q·k for a whole head, and no more time than causal
attention without gates.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from alibi_attn import records
from alibi_attn.bench.by_kind import records_by_kind
from alibi_attn.bench.gates import Inputs, asked, measured, summary
from alibi_attn.lab import experiment
from alibi_attn.lab.config import EvalConfig, Method, ModelConfig, Recipe, RunConfig, Scale, TrainConfig
from alibi_attn.lab.data import load_corpus
from alibi_attn.lab.fields import override
from alibi_attn.lab.hooks import ForgetGates, LayerInput, Pass
from alibi_attn.lab.model import LanguageModel
from alibi_attn.recipes.trained_reach import outputs_of, trained_model

METHODS: tuple[Method, ...] = ("fox", "alibi-fox")
LENGTHS = {"smoke": (128, 256), "small": (2048, 4096, 8192, 16_384)}


def runs(scale: Scale) -> tuple[RunConfig, ...]:
    """Gates alone, and gates beside slopes; eight heads of 64 in all, as the noise has them."""
    if scale == "smoke":
        return tuple(
            RunConfig(
                model=ModelConfig(method=method, num_layers=2, num_heads=2, embed_dim=32, ffn_dim=40),
                train=TrainConfig(length=32, steps=8, batch_tokens=256, warmup_steps=2),
                eval=EvalConfig(lengths=(32, 64), tokens=64, batch_tokens=256),
            )
            for method in METHODS
        )
    return tuple(
        RunConfig(
            model=ModelConfig(method=method, num_layers=4, num_heads=2, embed_dim=128, ffn_dim=344),
            train=TrainConfig(length=512, steps=300, batch_tokens=4096, learning_rate=2e-3, warmup_steps=32),
            eval=EvalConfig(lengths=(512, 4096), tokens=16_384),
        )
        for method in METHODS
    )


RECIPE = Recipe(
    name="trained-gates",
    question="How many scores do the gates of a trained model leave to compute, and how long do they take?",
    paper="none: the certificate of gates, on trained weights",
    command="alibi bench trained-gates",
    cost="small: about five minutes on two cores; smoke: seconds",
    expected="fewer scores than inside of ACP's boundary, and less time than causal attention without gates",
    runs=runs,
)


def trained_gates(
    out: Path,
    *,
    scale: str = "small",
    text: Sequence[Path] = (),
    run_folder: Path = Path("runs/trained-gates"),
    repeats: int = 5,
    budget_s: float = 10.0,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Train (or resume), capture and measure; one record a model.

    Args:
        text: files and folders to train and to test on; by default what Python ships with.

    Raises:
        ValueError: another scale, or a text that is too short.
        RuntimeError: a peer is wrong.
    """
    if scale not in LENGTHS:
        raise ValueError(f"scale is {scale!r} but must be 'smoke' or 'small'")
    lengths = LENGTHS[scale]
    changes = {"data.corpus": "text", "data.text": ",".join(map(str, text))} if text else {}
    wanted = [override(config, changes) for config in runs(cast(Scale, scale))]
    corpus = load_corpus(wanted[0].data, run_folder / "tokens")
    if len(corpus.valid) < lengths[-1]:
        raise ValueError(
            f"the text keeps {len(corpus.valid)} tokens for the test but {lengths[-1]} are measured; pass a longer text"
        )
    say("training")
    experiment.run(RECIPE, out=run_folder, scale=cast(Scale, scale), overrides=changes)
    inputs: dict[str, Inputs] = {}
    configs: dict[str, dict[str, records.Json]] = {}
    for config in wanted:
        model = trained_model(run_folder, RECIPE, config, corpus)
        name = f"trained-{config.model.method}"
        inputs[name] = captured_gates(model, corpus.valid[None, : lengths[-1]].long())
        _, heads, _, head_dim = inputs[name].query.shape
        configs[name] = {
            "method": config.model.method, "layers": config.model.num_layers, "trained": config.train.length,
            "steps": config.train.steps, "batch_tokens": config.train.batch_tokens, "corpus": corpus.facts,
            **asked(heads, head_dim, lengths),
        }  # fmt: skip
        say(described(name, inputs[name]))
    return records_by_kind(
        out, "gates", configs, lengths=lengths, summary=summary, train_step=None, say=say,
        measure=lambda name, n: measured(name, inputs[name].first(n), repeats=repeats, budget_s=budget_s, say=say),
    )  # fmt: skip


def captured_gates(model: LanguageModel, tokens: Tensor) -> Inputs:
    """Queries, keys, values and gates of all layers on one text [1, n]; the layers are the sequences of the batch.

    Raises:
        ValueError: a model without gates.
    """
    heads, length = model.config.num_heads, tokens.shape[1]
    layers = outputs_of(model, tokens, ("attention_norm", "q", "k", "v")).values()
    query, key, value = (
        torch.cat([part[name] for part in layers]).unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
        for name in ("q", "k", "v")
    )
    gates, slopes = [], None
    with torch.no_grad():
        for index, part in enumerate(layers):
            seen = LayerInput(part["attention_norm"], index)
            bias = model.position.bias(Pass(length, length, input=seen))
            if not isinstance(bias, ForgetGates):
                raise ValueError(
                    f"the model has {model.config.method} positions; those with gates: {', '.join(METHODS)}"
                )
            gates.append(bias.log_fgate)
            slopes = bias.slopes
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(0))
    return Inputs(query, key, value, grad, torch.cat(gates), slopes)


def described(name: str, inputs: Inputs) -> str:
    """A line for every layer: how large scores may be, and over how many tokens the heads forget, by the mean ln f."""
    bound = inputs.query.norm(dim=-1).amax(-1) * inputs.key.norm(dim=-1).amax(-1) * inputs.query.shape[-1] ** -0.5
    memory = -1 / inputs.log_fgate.double().mean(-1)
    lines = [
        f"  layer {layer}: U {', '.join(f'{x:.0f}' for x in u)}; a gate takes 1 nat in {', '.join(f'{x:.2g}' for x in m)} tokens"
        for layer, (u, m) in enumerate(zip(bound.tolist(), memory.tolist(), strict=True))
    ]
    return "\n".join([name, *lines])
