"""What backward of the Triton kernels leaves out because forward measured it; runs in the child process with the interpreter."""

import torch
from certificate_attack import keys_in_tiles, spread
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.plan import measured_tiles
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import Tiles


def visited(spec: AttentionSpec[Tensor], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, T, S] bool: the keys that forward visits, those of the query kernel, and those of the key kernel."""
    tiles = fused.plan(spec, query, key, value)
    ours = keys_in_tiles(spec, Tiles(tiles.bands, tiles.outlier_tiles, tiles.beside, tiles.weight, tiles.rows))
    if not fused.measures(spec, query):
        return ours, ours, ours
    fused.forward(spec, query, key, value, tiles)
    measured = measured_tiles(spec, tiles)
    outliers = measured.outlier_tiles[:, :, None, :, None] == torch.arange(-(-spec.key_len // TILE))
    low, high = measured.bands[..., 2:3], measured.bands[..., 3:4]
    tile = torch.arange(outliers.shape[-1])
    allowed = outliers.any(-2) & (tile >= low) & (tile < high)
    return ours, keys_in_tiles(spec, measured), keys_in_tiles(spec, measured) | spread(spec, allowed, TILE)
