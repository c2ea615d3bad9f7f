"""Which whole tiles a key mask, segments and a key bias hide, computed by two kernels; nothing is read on the host."""

import torch
from torch import Tensor

from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, width_for
from alibi_attn.attention.backends.fused.kernels.arguments import Labels
from alibi_attn.attention.backends.fused.launch import (
    NONE,
    Argument,
    constants,
    grouped,
    launch,
    number,
    scratch,
    strided,
)
from alibi_attn.attention.backends.fused.space import Plan, Space, starts
from alibi_attn.attention.call.spec import AttentionSpec
from alibi_attn.attention.call.transforms import in_memory
from alibi_attn.attention.certificate.constants import TILE

Spec = AttentionSpec[Tensor]

_WIDTH = 16


class FullTiles:
    """The masks of a call in whole tiles. R = B rows, or B·H with a key bias, which hides other keys from each head.

    Args:
        call: its `Call`.
        sums: gets `sums` of the kernels' Norms; given with a key bias.
    """

    def __init__(self, spec: Spec, call: Argument, device: torch.device, sums: Argument = NONE) -> None:
        from alibi_attn.attention.backends.fused.kernels.masks import labels_kernel

        self.spec, self.call = spec, call
        self.rows = spec.batch * heads_of_masks(spec)
        r, b, tiles, blocks = self.rows, spec.batch, -(-spec.key_len // TILE), -(-spec.query_len // TILE)
        self.blocks, self.tiles = blocks, tiles
        words = (2 * r * tiles, 2 * r * tiles, r * tiles, 2 * r * tiles, 2 * b * blocks, 2 * b * blocks, b * blocks)
        at = starts(*words, 2 * r * blocks, r)
        self._tensor = scratch(at[-1], device)
        space, wide = Space(self._tensor), torch.int64
        self.keys = grouped(Labels, space.at(at[0], wide), space.at(at[1], wide), space.at(at[2]), space.at(at[3]))
        self.queries = grouped(Labels, space.at(at[4], wide), space.at(at[5], wide), space.at(at[6]), NONE)
        self._allowed_at = at[7]
        self.allowed_keys, self.first_seen = space.at(at[7]), space.at(at[8])
        programs = r * tiles + b * blocks
        if programs > 0:
            launch(
                device,
                labels_kernel,
                (programs, 1, 1),
                constants(CAUSAL=spec.causal, num_warps=1 if spec.key_bias is None else 4),
                call,
                self.keys,
                self.queries,
                NONE if spec.key_bias is None else strided(in_memory(spec.key_bias)),
                sums,
            )

    @classmethod
    def of(cls, spec: Spec, call: Argument, device: torch.device) -> "FullTiles":
        return cls(spec, call, device)

    def spread(self, plan: Plan) -> None:
        """Fills `allowed_keys`, `first_seen` and the masks' part of a plan."""
        blocks, tiles = plan.space.at(plan.layout.full_blocks), plan.space.at(plan.layout.full_tiles)
        self._spread(self.first_seen, blocks, tiles, plan.layout.row, plan.rows)

    def allowed(self) -> Tensor:
        """[R, ⌈T / TILE⌉, 2] int32: the masks let TILE queries see no key outside this interval."""
        self._spread(NONE, NONE, NONE, 0, TILE)
        count = 2 * self.rows * self.blocks
        return self._tensor[self._allowed_at : self._allowed_at + count].view(self.rows, self.blocks, 2)

    def of_blocks(self, rows: int) -> Tensor:
        """[R, N, 2] int32: for every block of `rows` queries an interval of tiles in which nothing is hidden."""
        full = self._full(-(-self.spec.query_len // rows))
        self._spread(NONE, Space(full).at(0), NONE, full[0].numel() * heads_of_masks(self.spec), rows)
        return full

    def of_tiles(self, rows: int) -> Tensor:
        """[R, ⌈S / TILE⌉, 2] int32: for every tile of keys an interval of blocks of `rows` queries that it hides nothing from."""
        full = self._full(self.tiles)
        self._spread(NONE, NONE, Space(full).at(0), full[0].numel() * heads_of_masks(self.spec), rows)
        return full

    def _full(self, count: int) -> Tensor:
        return torch.empty((self.rows, count, 2), dtype=torch.int32, device=self._tensor.device)

    def _spread(self, first_seen: Argument, blocks: Argument, tiles: Argument, row: int, rows: int) -> None:
        from alibi_attn.attention.backends.fused.kernels.masks import spread_kernel

        programs = self.rows * -(-max(self.tiles, self.blocks) // _WIDTH)
        if programs > 0:
            width = width_for(max(self.tiles, self.blocks), most=64)
            launch(
                self._tensor.device,
                spread_kernel,
                (programs, 1, 1),
                constants(PARTS=rows // TILE, BIAS_ROWS=PLAN_ROWS, WIDTH=_WIDTH, OF_WIDTH=width),
                self.call,
                self.keys,
                self.queries,
                self.allowed_keys,
                first_seen,
                blocks,
                tiles,
                number(row),
            )


def heads_of_masks(spec: Spec) -> int:
    """How many heads have masks of their own; 0 = nothing hides keys."""
    if spec.key_bias is not None:
        return spec.num_heads
    return 1 if spec.hides_keys else 0
