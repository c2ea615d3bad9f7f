"""`alibi bench trained-gates`: train small models with forget gates, and measure attention on the gates they learned as
`bench gates` does on noise.

The noise of `alibi bench gates` has one kind of gate; a model has heads that forget immediately and heads that
remember. The lab trains two small models, one with forget gates only and one with gates and ALiBi's slopes. Queries,
keys, values and gates of all layers are captured on held-out text and measured like the noise: times, the number of
computed scores, and the number inside ACP's boundary. The layers are the sequences of one batch.

Cost: small, about five minutes on two cores; smoke, seconds.
Expected: fewer scores than inside ACP's boundary, which uses one bound of q·k for a whole head, and no more time than causal
attention without gates.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from alibi_lab.lab.config import Method
from alibi_lab.lab.model.language_model import LanguageModel
from alibi_lab.lab.model.position_method import ForgetGates, LayerInput, Pass
from alibi_lab.measure.gates import Inputs, gates_config, measured, summary
from alibi_lab.measure.harness import Config, Rows, Say, keep_by_length
from alibi_lab.measure.trained_models import by_head, outputs_of, small_recipe, trained

GATED: tuple[Method, ...] = ("fox", "alibi-fox")
LENGTHS = {"smoke": (128, 256), "small": (2048, 4096, 8192, 16_384)}

RECIPE = small_recipe("trained-gates", GATED, heads=2, sizes={"smoke": (32, 40), "small": (128, 344)}, smoke_length=64)


def trained_gates(
    out: Path,
    *,
    scale: str = "small",
    text: Sequence[Path] = (),
    run: Path = Path("runs/trained-gates"),
    repeats: int = 5,
    seconds: float = 10.0,
    say: Say = print,
) -> list[Path]:
    """Trains or resumes, captures and measures; saves one record per model and returns their paths.

    Args:
        scale: "smoke" or "small".
        text: a text file or folder to train and test on; can be repeated. Default: Python's own source files.
        run: folder for the trainings.
        repeats: most turns per call; the median counts.
        seconds: time limit in seconds per length and direction.
    """
    lengths = LENGTHS.get(scale, (0,))
    inputs: dict[str, Inputs] = {}
    configs: dict[str, Config] = {}
    for config, model, corpus in trained(RECIPE, run, scale, longest=lengths[-1], text=text, say=say):
        name = f"trained-{config.model.method}"
        inputs[name] = captured_gates(model, corpus.valid[None, : lengths[-1]].long())
        _, heads, _, head_dim = inputs[name].query.shape
        configs[name] = {
            "method": config.model.method,
            "layers": config.model.num_layers,
            "trained": config.train.length,
            "steps": config.train.steps,
            "batch_tokens": config.train.batch_tokens,
            "corpus": corpus.facts,
            **gates_config(heads, head_dim, lengths),
        }
        say(described(name, inputs[name]))

    def measure(name: str, length: int) -> Rows:
        return measured(inputs[name].first(length), repeats=repeats, seconds=seconds)

    return keep_by_length(out, "gates", configs, lengths=lengths, measure=measure, summary=summary, say=say)


def captured_gates(model: LanguageModel, tokens: Tensor) -> Inputs:
    """Queries, keys, values and gates of all layers on one text [1, n]; the layers are the sequences of the batch.

    Raises:
        ValueError: the model has no gates.
    """
    heads, length = model.config.num_heads, tokens.shape[1]
    layers = outputs_of(model, tokens, ("attention_norm", "q", "k", "v")).values()
    query, key, value = (by_head(torch.cat([part[name] for part in layers]), heads).contiguous() for name in "qkv")
    gates, slopes = [], None
    with torch.no_grad():
        for index, part in enumerate(layers):
            layer_input = LayerInput(part["attention_norm"], index)
            bias = model.position.bias(Pass(length, length, input=layer_input))
            if not isinstance(bias, ForgetGates):
                raise ValueError(
                    f"the model has {model.config.method} positions, without gates; pass a model with {' or '.join(GATED)}"
                )
            gates.append(bias.log_fgate)
            slopes = bias.slopes
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(0))
    return Inputs(query, key, value, grad, torch.cat(gates), slopes)


def described(name: str, inputs: Inputs) -> str:
    """One line per layer: the score bound U of each head, and the tokens over which it forgets 1 nat (from the mean ln f)."""
    bound = inputs.query.norm(dim=-1).amax(-1) * inputs.key.norm(dim=-1).amax(-1) * inputs.query.shape[-1] ** -0.5
    memory = -1 / inputs.log_fgate.double().mean(-1)
    lines = [
        f"  layer {layer}: U {', '.join(f'{x:.0f}' for x in u)}; gates take 1 nat in {', '.join(f'{x:.2g}' for x in m)} tokens"
        for layer, (u, m) in enumerate(zip(bound.tolist(), memory.tolist(), strict=True))
    ]
    return "\n".join([name, *lines])
