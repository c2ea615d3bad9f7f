"""What the layers of a trained model compute on a text: the outputs of their parts, and the inputs of their attention."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from alibi_lab.lab.model.language_model import Block, LanguageModel
from alibi_lab.lab.model.position_method import ForgetGates, LayerInput, Pass, PositionMethod


def outputs_of(model: LanguageModel, tokens: Tensor, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """The outputs [1, n, E] of the named parts of every block on one text [1, n]: {"layer-0": {name: output}, …}."""
    outputs: dict[str, dict[str, Tensor]] = {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for index, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
            layer = outputs.setdefault(f"layer-{index}", {})
            for name in names:
                hooks.enter_context(getattr(block, name).register_forward_hook(functools.partial(_keep, layer, name)))
        model.eval()(tokens)
    return outputs


def _keep(outputs: dict[str, Tensor], name: str, module: torch.nn.Module, inputs: object, output: Tensor) -> None:
    """A forward hook that keeps the output under a name."""
    outputs[name] = output


def by_head(output: Tensor, num_heads: int) -> Tensor:
    """[B, n, E] -> [B, H, n, D]."""
    return output.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def slopes_of(model: LanguageModel, length: int) -> Tensor:
    """[H], the model's slopes.

    Raises:
        ValueError: its position method is not a bias that is linear in the distance.
    """
    kind, found = type(model.position), None
    if kind.rotate is PositionMethod.rotate and not kind.per_layer and kind.add is PositionMethod.add:
        bias = model.position.bias(Pass(length, length))
        found = torch.zeros(model.config.num_heads) if bias is None else bias
    if not isinstance(found, Tensor) or found.ndim != 1:
        raise ValueError(
            f"the model has {model.config.method} positions, which are not slopes, but certified reach needs a linear bias; "
            "pass a model with alibi, alibi-learned, alibi-half or none"
        )
    return found


@torch.no_grad()
def attention_inputs(
    model: LanguageModel, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor | None]]:
    """(query, key, value, (slopes [H], ln of the gates [L, H, n] or None)) of all L layers on a text [1, n], [L, H, n, D] each.

    Raises:
        ValueError: a model with neither slopes nor gates.
    """
    heads, length = model.config.num_heads, tokens.shape[1]
    layers = list(outputs_of(model, tokens, ("attention_norm", "q", "k", "v")).values())
    query, key, value = (by_head(torch.cat([part[name] for part in layers]), heads).contiguous() for name in "qkv")
    if not type(model.position).per_layer:
        return query, key, value, (slopes_of(model, length), None)
    inputs = (LayerInput(part["attention_norm"], index) for index, part in enumerate(layers))
    biases = [model.position.bias(Pass(length, length, input=each)) for each in inputs]
    gates = [bias for bias in biases if isinstance(bias, ForgetGates)]
    if len(gates) < len(layers):
        raise ValueError(f"the model has {model.config.method} positions, neither slopes nor forget gates")
    slopes = torch.zeros(heads) if gates[0].slopes is None else gates[0].slopes
    return query, key, value, (slopes, torch.cat([bias.log_fgate for bias in gates]))
