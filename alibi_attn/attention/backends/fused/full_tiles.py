"""Which whole tiles a key mask, segments and a key bias hide; for GPU kernels, without a read on the host."""

import dataclasses

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.kernels.arguments import Call, Labels, QueryOffset
from alibi_attn.attention.backends.fused.key_bias import is_narrow
from alibi_attn.attention.backends.fused.launch import on, width_for
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.spec import AttentionSpec
from alibi_attn.attention.visibility import first_positions, shown_keys

Spec = AttentionSpec[Tensor]


@dataclasses.dataclass(frozen=True)
class FullTiles:
    """The masks of a call in whole tiles; computed before its plan, and again for backward. R = B, or B·H with a key bias,
    which hides other keys from each head.

    Args:
        rows: R.
        query_offset: [R] int64.
        edges: [2, R, ⌈S / TILE⌉] int32, as in `keys`.
    """

    spec: Spec
    call: Call
    rows: int
    query_offset: QueryOffset
    edges: Tensor
    keys: Labels
    queries: Labels

    @classmethod
    def of(cls, spec: Spec, call: Call, device: torch.device) -> "FullTiles":
        masks = call.masks
        edges, keys = _labels(spec.batch, spec.key_len, masks.keys, masks.key_segments, device)
        _, queries = _labels(spec.batch, spec.query_len, None, masks.query_segments, device)
        if call.key_bias is None:
            return cls(spec, call, spec.batch, call.query_offset, edges, keys, queries)
        rows = spec.batch * spec.num_heads
        shown = shown_keys(spec)
        assert shown is not None
        edges, own = _labels(rows, spec.key_len, shown.view(torch.int8), None, device)
        keys, queries = (
            Labels(*(None if x is None else x.repeat_interleave(spec.num_heads, 0) for x in (*labels[:3], None)))  # type: ignore[attr-defined]
            for labels in (keys, queries)
        )
        uniform = keys.uniform * own.uniform * is_narrow(call.key_bias).flatten(0, 1)  # type: ignore[operator]
        keys = Labels(keys.least, keys.most, uniform.to(torch.int32), edges)
        offset = first_positions(spec, device).expand(spec.batch).repeat_interleave(spec.num_heads)
        return cls(spec, call, rows, QueryOffset(offset, 1), edges, keys, queries)

    def allowed(self) -> Tensor:
        """[R, ⌈T / TILE⌉, 2] int32: the masks let TILE queries see no key outside this interval."""
        from alibi_attn.attention.backends.fused.kernels.masks import allowed_kernel

        spec, blocks, tiles = self.spec, -(-self.spec.query_len // TILE), self.edges.shape[-1]
        allowed = torch.empty((self.rows, blocks, 2), dtype=torch.int32, device=self.edges.device)
        if allowed.numel() > 0:
            with on(allowed):
                allowed_kernel[(self.rows * -(-blocks // 16),)](
                    self.queries, self.keys, allowed, blocks, tiles, spec.key_len, HAS_SEGMENTS=spec.key_segments is not None,
                    WIDTH=16, OF_WIDTH=width_for(tiles),
                )  # fmt: skip
        return allowed

    def of_blocks(self, rows: int) -> Tensor:
        """[R, N, 2] int32: for every block of `rows` queries an interval of tiles in which nothing is hidden."""
        return self._beside(self.queries, self.keys, rows // TILE, 1, of_keys=False)

    def of_tiles(self, rows: int) -> Tensor:
        """[R, ⌈S / TILE⌉, 2] int32: for every tile of keys an interval of blocks of `rows` queries that it hides nothing from."""
        return self._beside(self.keys, self.queries, 1, rows // TILE, of_keys=True)

    def _beside(self, own: Labels, others: Labels, parts: int, of_parts: int, *, of_keys: bool) -> Tensor:
        from alibi_attn.attention.backends.fused.kernels.masks import full_kernel, runs_kernel

        b, sizes = self.rows, (self.spec.key_len, self.spec.query_len)
        tiles, of_tiles = (-(-size // TILE) for size in (sizes if of_keys else sizes[::-1]))
        count, of_count = -(-tiles // parts), -(-of_tiles // of_parts)
        full = torch.zeros((b, count, 2), dtype=torch.int32, device=self.edges.device)
        if count == 0 or of_count == 0:
            return full
        runs = torch.empty((2, b, of_count), dtype=torch.int32, device=full.device)
        with on(full):
            runs_kernel[(b,)](others, runs, of_tiles, of_count, PARTS=of_parts, WIDTH=width_for(of_count))
            full_kernel[(b * -(-count // 64),)](
                own, others, runs, self.query_offset, full, tiles, count, of_tiles, of_count,
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
