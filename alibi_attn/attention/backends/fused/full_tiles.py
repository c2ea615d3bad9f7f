"""What key mask and segments hide, in whole tiles, for the kernels of a GPU: from a few launches, without reading on the host."""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.kernels.arguments import Call, Labels
from alibi_attn.attention.backends.fused.launch import on, width_for
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class FullTiles:
    """What a call's masks say; made before its plan, and once more for its backward.

    Args:
        edges: [2, B, ⌈S / TILE⌉] int32, those of `keys`.
    """

    spec: Spec
    call: Call
    edges: Tensor
    keys: Labels
    queries: Labels

    @classmethod
    def of(cls, spec: Spec, call: Call, device: torch.device) -> "FullTiles":
        masks = call.masks
        edges, keys = _labels(spec.batch, spec.key_len, masks.keys, masks.key_segments, device)
        _, queries = _labels(spec.batch, spec.query_len, None, masks.query_segments, device)
        return cls(spec, call, edges, keys, queries)

    def allowed(self) -> Tensor:
        """[B, ⌈T / TILE⌉, 2] int32: outside of these keys, the masks let TILE queries see none."""
        from alibi_attn.attention.backends.fused.kernels.masks import allowed_kernel

        spec, blocks, tiles = self.spec, -(-self.spec.query_len // TILE), self.edges.shape[-1]
        allowed = torch.empty((spec.batch, blocks, 2), dtype=torch.int32, device=self.edges.device)
        if allowed.numel() > 0:
            with on(allowed):
                allowed_kernel[(spec.batch * -(-blocks // 16),)](
                    self.queries, self.keys, allowed, blocks, tiles, spec.key_len, HAS_SEGMENTS=spec.key_segments is not None,
                    WIDTH=16, OF_WIDTH=width_for(tiles),
                )  # fmt: skip
        return allowed

    def of_blocks(self, rows: int) -> Tensor:
        """[B, N, 2] int32: for every block of `rows` queries an interval of tiles in which nothing is hidden."""
        return self._beside(self.queries, self.keys, rows // TILE, 1, of_keys=False)

    def of_tiles(self, rows: int) -> Tensor:
        """[B, ⌈S / TILE⌉, 2] int32: for every tile of keys an interval of blocks of `rows` queries that it hides nothing from."""
        return self._beside(self.keys, self.queries, 1, rows // TILE, of_keys=True)

    def _beside(self, own: Labels, others: Labels, parts: int, of_parts: int, *, of_keys: bool) -> Tensor:
        from alibi_attn.attention.backends.fused.kernels.masks import full_kernel, runs_kernel

        b, sizes = self.spec.batch, (self.spec.key_len, self.spec.query_len)
        tiles, of_tiles = (-(-size // TILE) for size in (sizes if of_keys else sizes[::-1]))
        count, of_count = -(-tiles // parts), -(-of_tiles // of_parts)
        full = torch.zeros((b, count, 2), dtype=torch.int32, device=self.edges.device)
        if count == 0 or of_count == 0:
            return full
        runs = torch.empty((2, b, of_count), dtype=torch.int32, device=full.device)
        with on(full):
            runs_kernel[(b,)](others, runs, of_tiles, of_count, PARTS=of_parts, WIDTH=width_for(of_count))
            full_kernel[(b * -(-count // 64),)](
                own, others, runs, self.call.query_offset, full, tiles, count, of_tiles, of_count,
                PARTS=parts, OF_PARTS=of_parts, WIDTH=64, KEYS=of_keys,
            )  # fmt: skip
        return full


def _labels(batch: int, count: int, key_mask: object, segments: object, device: torch.device) -> tuple[Tensor, Labels]:
    """(edges, labels)"""
    from alibi_attn.attention.backends.fused.kernels.masks import labels_kernel

    tiles = -(-count // TILE)
    least, most = (torch.empty((batch, tiles), dtype=torch.int64, device=device) for _ in range(2))
    uniform = torch.empty((batch, tiles), dtype=torch.int32, device=device)
    edges = torch.empty((2, batch, tiles), dtype=torch.int32, device=device)
    labels = Labels(least, most, uniform, edges)
    if tiles > 0:
        with on(uniform):
            labels_kernel[(batch * tiles,)](key_mask, segments, labels, count, tiles, num_warps=1)
    return edges, labels
