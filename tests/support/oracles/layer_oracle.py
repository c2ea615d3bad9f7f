"""`ALiBiAttention` in fp64, from its weights: the maps, the norms of heads, and the definition of attention in `parts_oracle`."""

from parts_oracle import truth
from torch import Tensor

from alibi_attn import ALiBiAttention


def heads_of(layer: ALiBiAttention, name: str, x: Tensor) -> Tensor:
    """[B, heads, T, D]: queries ("q"), keys ("k") or values ("v") of x."""
    state = {key: weight.double() for key, weight in layer.state_dict(keep_vars=True).items()}
    y = x.double() @ state[f"{name}_proj.weight"].T + state.get(f"{name}_proj.bias", 0)
    y = y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    norm = state.get(f"{name}_norm.weight")
    return y if norm is None else norm * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def by_formula(layer: ALiBiAttention, x: Tensor, memory: Tensor | None = None, **options: object) -> Tensor:
    """[B, T, E]; options as for `truth`, by default those of the layer."""
    sources = x if memory is None else memory
    given = {"causal": layer.causal, "window": layer.window, "sinks": layer.sinks_of_window, **options}
    parts = (heads_of(layer, name, y) for name, y in (("q", x), ("k", sources), ("v", sources)))
    mixed, _ = truth(*parts, layer.slopes.values, **given)
    return output_of(layer, mixed)


def output_of(layer: ALiBiAttention, mixed: Tensor) -> Tensor:
    """The layer's last map of [B, H, T, D]."""
    bias = layer.out_proj.bias
    return mixed.transpose(1, 2).flatten(2) @ layer.out_proj.weight.double().T + (0 if bias is None else bias.double())
