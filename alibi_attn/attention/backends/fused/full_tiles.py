"""What key mask and segments hide, in whole tiles, for the kernels of a GPU: from a few launches, without reading on the host."""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.launch import on, width_for
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class Labels:
    """Of every TILE keys, or queries, their segments and whether anything is hidden; see `kernels/masks.py`.

    Args:
        least, most: [B, tiles] int64; whole: [B, tiles] int32; edges: [2, B, tiles] int32.
    """

    least: Tensor
    most: Tensor
    whole: Tensor
    edges: Tensor


@dataclasses.dataclass(frozen=True)
class FullTiles:
    """What a call's masks say; made before its plan, and once more for its backward."""

    spec: Spec
    first: Tensor
    keys: Labels
    queries: Labels

    @classmethod
    def of(cls, spec: Spec, first: Tensor) -> "FullTiles":
        """
        Args:
            first: [B] or [1], the position of query 0.
        """
        keys = _labels(spec.batch, spec.key_len, spec.key_mask, spec.key_segments, first)
        return cls(spec, first, keys, _labels(spec.batch, spec.query_len, None, spec.query_segments, first))

    def allowed(self) -> Tensor:
        """[B, ⌈T / TILE⌉, 2] int32: outside of these keys, the masks let TILE queries see none."""
        from alibi_attn.attention.backends.fused.kernels.masks import allowed_kernel

        spec, (b, blocks), tiles = self.spec, self.queries.least.shape, self.keys.least.shape[1]
        allowed = torch.empty((b, blocks, 2), dtype=torch.int32, device=self.first.device)
        if allowed.numel() > 0:
            with on(allowed):
                allowed_kernel[(b * -(-blocks // 16),)](
                    self.queries.least, self.queries.most, self.keys.edges, self.keys.least, self.keys.most, allowed, blocks,
                    tiles, spec.key_len, HAS_SEGMENTS=spec.key_segments is not None, WIDTH=16, OF_WIDTH=width_for(tiles),
                    TILE=TILE,
                )  # fmt: skip
        return allowed

    def of_blocks(self, rows: int) -> Tensor:
        """[B, N, 2] int32: for every block of `rows` queries an interval of tiles in which nothing is hidden."""
        return self._beside(self.queries, self.keys, rows // TILE, 1, of_keys=False)

    def of_tiles(self, rows: int) -> Tensor:
        """[B, ⌈S / TILE⌉, 2] int32: for every tile of keys an interval of blocks of `rows` queries that it hides nothing from."""
        return self._beside(self.keys, self.queries, 1, rows // TILE, of_keys=True)

    def _beside(self, own: Labels, others: Labels, parts: int, of_parts: int, *, of_keys: bool) -> Tensor:
        from alibi_attn.attention.backends.fused.kernels.masks import open_kernel, runs_kernel

        (b, tiles), of_tiles = own.least.shape, others.least.shape[1]
        count, of_count = -(-tiles // parts), -(-of_tiles // of_parts)
        opened = torch.zeros((b, count, 2), dtype=torch.int32, device=self.first.device)
        if count == 0 or of_count == 0:
            return opened
        runs = torch.empty((2, b, of_count), dtype=torch.int32, device=self.first.device)
        of_others = others.least, others.most, others.whole
        with on(opened):
            runs_kernel[(b,)](*of_others, runs, of_tiles, of_count, PARTS=of_parts, WIDTH=width_for(of_count))
            open_kernel[(b * -(-count // 64),)](
                own.least, own.most, own.whole, *of_others, runs, self.first, opened, 0 if self.first.numel() == 1 else 1, tiles,
                count, of_tiles, of_count, PARTS=parts, OF_PARTS=of_parts, WIDTH=64, TILE=TILE, KEYS=of_keys,
            )  # fmt: skip
        return opened


def _labels(batch: int, count: int, mask: Tensor | None, segments: Tensor | None, unused: Tensor) -> Labels:
    from alibi_attn.attention.backends.fused.kernels.masks import labels_kernel

    tiles = -(-count // TILE)
    least, most = (torch.empty((batch, tiles), dtype=torch.int64, device=unused.device) for _ in range(2))
    whole = torch.empty((batch, tiles), dtype=torch.int32, device=unused.device)
    edges = torch.empty((2, batch, tiles), dtype=torch.int32, device=unused.device)
    if tiles > 0:
        with on(whole):
            labels_kernel[(batch * tiles,)](
                unused if mask is None else mask.contiguous().view(torch.int8),
                unused if segments is None else segments.contiguous(), least, most, whole, edges, count, tiles,
                HAS_MASK=mask is not None, HAS_SEGMENTS=segments is not None, TILE=TILE, num_warps=1,
            )  # fmt: skip
    return Labels(least, most, whole, edges)
