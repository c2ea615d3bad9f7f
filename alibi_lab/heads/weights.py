"""`alibi heads weights`: which tokens the heads of a layer attend to, in float64."""

import torch
from torch import Tensor

from alibi_lab.heads.loading import Loaded, tokens_of
from alibi_lab.lab.model.layer_outputs import attention_weights


def weights(model: Loaded, text: str, *, layer: int = 0, length: int | None = None) -> tuple[Tensor, Tensor]:
    """The weights [H, n, n] of a layer on the first tokens of a text (default: 64), row i those of query i, and the slopes [H].

    Raises:
        ValueError: a layer that the model does not have, a model without slopes, or a text that is too short.
    """
    tokens, found = tokens_of(model, text, length or 64), dict[int, tuple[Tensor, Tensor]]()

    def see(at: int, query: Tensor, key: Tensor, slopes: Tensor, scale: float) -> None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        heads = zip(query[0], key[0], slopes.tolist(), strict=True)
        rows = [torch.cat([w for _, w in attention_weights(q, k, m, scale, rows=256)]) for q, k, m in heads]
        found[at] = torch.stack(rows), slopes

    with torch.no_grad():
        model.run(tokens, see)
    if layer not in found:
        raise ValueError(f"layer is {layer} but the model has the layers 0 to {max(found)}")
    return found[layer]
